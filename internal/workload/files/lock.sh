# Sourced by what starts a server, with the directory of its data volume in $volume: takes the volume's
# lock, or waits for it.
#
# What must hold: one server at a time has the volume, and nothing of the data is read or written before.
# Where a pod is deleted by force, the next one begins while the first one's server may still run. The
# lock is on the open file 9, which the server inherits, and with it every process that it forks: the
# kernel takes it back when the last of them has ended, however it ended. So nobody may close 9; and
# nobody may remove the file, since another one of its name has another lock.
lock=$volume/holdfast.lock

refuse() {
	echo "the server is not started: $*" >&2
	exit 1
}

command -v flock >/dev/null || refuse "the image has no flock, and without a lock in its volume two servers" \
	"could write to it at once. Use an image with flock, of util-linux or busybox, as the official ones have it."
true >>"$lock" || refuse "$lock cannot be written, and without a lock in its volume two servers could write to it" \
	"at once. The user $(id -u), or the group $(id -g), must be allowed to write to the volume."

# The first process of a container is ended by no signal that it does not handle: SIGTERM, or what the image
# names instead, as PostgreSQL's do SIGINT. What is started has none of it.
waiting=
leave() {
	[ -z "$waiting" ] || kill "$waiting" 2>/dev/null || true
	exit 143
}
trap leave HUP INT QUIT TERM

exec 9>>"$lock"
# One that cannot be taken because somebody has it says nothing. Not all of them tell it by the exit code.
if ! said=$(flock -n 9 2>&1); then
	[ -z "$said" ] || refuse "$lock cannot be locked: $said. Use a volume whose file system has locks."
	echo "another server still has the volume $volume: this one waits until that has ended, with all its processes." \
		"As a rule it is the one of the pod before, and ends by itself. If it does not, look on its node for a container" \
		"of that pod that still runs, and end it. Do not remove $lock: two servers at once destroy the records." >&2
	flock 9 &
	waiting=$!
	wait "$waiting" || refuse "$lock cannot be locked. Use a volume whose file system has locks."
	waiting=
fi
[ /dev/fd/9 -ef "$lock" ] || refuse "$lock was removed or replaced meanwhile. It is taken anew when the container begins again."
