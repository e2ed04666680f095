#!/bin/sh
# Makes the database in an empty volume, then becomes the server.
#
# The database is made under another name and gets its own when it is whole and on the disk: whoever
# is killed meanwhile leaves nothing that the next one would take for a database.
#
#   PGDATA                  where it is; required
#   POSTGRES_USER           the superuser, and the database of that name; postgres unless it is set
#   POSTGRES_PASSWORD_FILE  has the superuser's password; required to make a database
#   POSTGRES_INITDB_ARGS    further arguments of initdb, separated by spaces
set -eu

if [ "${1:-}" != postgres ]; then exec "$@"; fi

: "${PGDATA:?name the directory of the database}"
: "${POSTGRES_USER:=postgres}"
umask 0077

if [ ! -s "$PGDATA/PG_VERSION" ]; then
	if [ ! -s "${POSTGRES_PASSWORD_FILE:-}" ]; then
		echo "there is no database in $PGDATA, and to make one POSTGRES_PASSWORD_FILE must name a file with a password" >&2
		exit 1
	fi
	if [ -d "$PGDATA" ] && ! rmdir "$PGDATA" 2>/dev/null; then
		echo "$PGDATA is neither empty nor a database: look at what is in it, and remove it if nobody needs it" >&2
		exit 1
	fi
	new=$PGDATA.new
	rm -rf "$new"
	# initdb asks for the name of who runs it: a user that the image does not know gets one.
	if ! getent passwd "$(id -u)" >/dev/null; then
		NSS_WRAPPER_PASSWD=$(mktemp)
		NSS_WRAPPER_GROUP=$(mktemp)
		echo "postgres:x:$(id -u):$(id -g):postgres:/:/sbin/nologin" >"$NSS_WRAPPER_PASSWD"
		echo "postgres:x:$(id -g):" >"$NSS_WRAPPER_GROUP"
		export NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP LD_PRELOAD=libnss_wrapper.so
	fi
	# shellcheck disable=SC2086 # the arguments are several words
	initdb --pgdata="$new" --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" \
		--auth-local=trust --auth-host=scram-sha-256 ${POSTGRES_INITDB_ARGS:-}
	# initdb has synced what is in it, but not the change of its name.
	mv "$new" "$PGDATA"
	sync "$(dirname "$PGDATA")"
	unset LD_PRELOAD NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP
fi

exec "$@"
