"""A real Kubernetes on this machine, for tests: etcd, control plane, containerd and kubelet in namespaces of their own.

    python -m cluster up [--nodes 2]    a cluster that stays until `down`; prints how to use it
    python -m cluster status | down
    python -m cluster kubectl ...       kubectl as its administrator
    python -m cluster node [NAME] ...   a command inside a node's namespaces
    python -m cluster image NAME ...    builds and imports local images: see `python -m cluster image`

KVCACHEPOOL_CLUSTER=0..9 names the cluster (default 0), so that several can run at once.
"""
