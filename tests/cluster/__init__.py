"""A real Kubernetes on this machine, for tests: etcd, control plane, containerd and kubelet in namespaces of their own.

From the shell, as root, with PYTHONPATH=tests, after `tools/setup.sh cluster` (`make cluster-up` does both):

    python -m cluster up [--nodes 2]    a cluster that stays until `down`; prints the KUBECONFIG to export
    python -m cluster status | down
    python -m cluster kubectl ...       kubectl as its administrator
    python -m cluster node [NAME] ...   a command inside a node's namespaces: ctr, crictl's work, ip, nft
    python -m cluster image NAME...     builds and imports local images (base, vllm-host, redis, stand-in, product)

KVCACHEPOOL_CLUSTER=0..9 names the cluster (default 0), so that several run side by side. Cluster N has the network
10.(77+N).0.0/16, and this machine reaches all of it: the API server at 10.77.0.1:6443, pods, Services. Pods reach this
machine at 10.77.0.254 (a webhook by URL, for example). Logs of all programs: $CACHE/cluster/slots/N/node1/logs.

From tests, with the fixtures of conftest.py: `kubernetes` (kubectl, HTTP, waiting), `cluster` (nodes, images, faults),
`namespace`, `base_image`, `product_image`. They start one cluster for the session, or use

    KVCACHEPOOL_CLUSTER=3              the one that `python -m cluster up` started there: saves the start
    KVCACHEPOOL_TEST_KUBECONFIG=file   any other cluster, where the test can; what it cannot is skipped with the reason

All of it ends with its owner, also when that is killed. Empty folders in /var/lib that kubelet wants may stay.
"""
