#!/bin/sh
# Whether this machine can run a Kubernetes in namespaces: asked before a quarter of an hour goes into building one.

refuse() {
    printf '%s\n' "make demo starts a Kubernetes in namespaces of this machine: $1." \
        "make demo-local shows the cache beside a real vLLM without Kubernetes, and needs neither." >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || refuse "that needs Linux"
[ "$(id -u)" = 0 ] || refuse "that needs root (sudo make demo)"
unshare -f -p -m -n -i -u --mount-proc --propagation private true 2>/dev/null ||
    refuse "the kernel, or the container that this runs in, does not let root make them"
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*/; do
    group="$hierarchy/kvcp-probe-$$"
    if mkdir "$group" 2>/dev/null; then
        rmdir "$group"
        exit 0
    fi
done
refuse "that needs cgroups that can be written, and /sys/fs/cgroup cannot"
