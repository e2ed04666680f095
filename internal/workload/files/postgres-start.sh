# Has the image's own entry point start the server, once the volume is its alone. In an empty volume that
# one makes the database, also with these arguments.
set -eu
volume=/var/lib/postgresql/data
. /etc/holdfast/lock.sh
command -v docker-entrypoint.sh >/dev/null || refuse "the image has no docker-entrypoint.sh, with which the official ones begin."
exec docker-entrypoint.sh "$@"
