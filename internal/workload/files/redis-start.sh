# Starts the server, whichever of the two the image has, once the volume is its alone.
set -eu
umask 0077
volume=/data
. /etc/holdfast/lock.sh
cd "$volume"
for server in valkey-server redis-server; do
	if command -v "$server" >/dev/null; then
		exec "$server" /etc/holdfast/redis.conf
	fi
done
refuse "the image has neither valkey-server nor redis-server."
