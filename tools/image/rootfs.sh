#!/bin/sh
# The file system of the image: the programs, the libraries and the loader that they name, two accounts, the system's certificates, and the
# loader's configuration and cache: NVIDIA's container toolkit tells a container's loader of the driver's libraries by these, and versions of
# it leave a container without them as it is.
#
#   tools/image/rootfs.sh FOLDER-OF-PROGRAMS ROOTFS
set -eu
from="$1" root="$2"
mkdir -p "$root/usr/local/bin" "$root/etc/ssl/certs" "$root/etc/ld.so.conf.d"
for name in kvcachepool-operator kvcachepool-sidecar kubectl-kvcachepool; do
    install -m 755 "$from/$name" "$root/usr/local/bin/"
    ldd "$from/$name" | grep -o '/[^ ]* (0x' | cut -d' ' -f1 | while read -r library; do
        install -D -m 755 "$library" "$root$library"
    done
done
printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' > "$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' > "$root/etc/group"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
printf '/usr/local/nvidia/lib64\n' > "$root/etc/ld.so.conf.d/nvidia.conf"
printf 'include /etc/ld.so.conf.d/*.conf\n' > "$root/etc/ld.so.conf"
/sbin/ldconfig -r "$root"
