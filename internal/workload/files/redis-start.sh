# Starts the server, whichever of the two the image has.
set -eu
umask 0077
cd /data
for server in valkey-server redis-server; do
	if command -v "$server" >/dev/null; then
		exec "$server" /etc/holdfast/redis.conf
	fi
done
echo "the image has neither valkey-server nor redis-server" >&2
exit 127
