#!/bin/sh
# The file system of the image: the programs, the libraries and the loader that they name, two accounts, the system's certificates.
#
#   tools/image/rootfs.sh FOLDER-OF-PROGRAMS ROOTFS
set -eu
from="$1" root="$2"
mkdir -p "$root/usr/local/bin" "$root/etc/ssl/certs"
for name in kvcachepool-operator kvcachepool-sidecar kubectl-kvcachepool; do
    install -m 755 "$from/$name" "$root/usr/local/bin/"
    ldd "$from/$name" | grep -o '/[^ ]* (0x' | cut -d' ' -f1 | while read -r library; do
        install -D -m 755 "$library" "$root$library"
    done
done
printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' > "$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' > "$root/etc/group"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
