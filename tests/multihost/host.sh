# The first process of a host: sh host.sh NAME FOLDER VISIBLE...; ends as its SSH server.
set -e
name=$1 folder=$2
shift 2
hostname "$name"
mount -t sysfs none /sys
mount -t tmpfs none /mnt
number=0
for path; do  # hold on to what is about to be covered
    number=$((number + 1))
    mkdir "/mnt/$number"
    mount --bind "$path" "/mnt/$number"
done
for private in /tmp /run /var/tmp /dev/shm; do
    mount -t tmpfs -o mode=1777 none "$private"
done
number=0
for path; do
    number=$((number + 1))
    mkdir -p "$path"
    mount --bind "/mnt/$number" "$path"
done
umount -l /mnt
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
mkdir -p /run/sshd
until [ -e /sys/class/net/eth0 ]; do sleep 0.01; done
exec /usr/sbin/sshd -D -e -f "$folder/$name.sshd" 2>"$folder/$name.log"
