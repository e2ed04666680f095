# Asks the server how it is.
#   alive: it answers over TCP, also that it is still recovering: to kill it would only have it begin again.
#          While a new volume is initialised the server does not listen there yet.
#   ready: it takes connections, and writes.
set -eu
case "$1" in
alive)
	code=0
	pg_isready -q -h 127.0.0.1 -p 5432 || code=$?
	# 0: it takes connections. 1: it answers that it does not yet.
	[ "$code" -le 1 ]
	;;
ready)
	pg_isready -q -h 127.0.0.1 -p 5432
	writes=$(psql -X -A -t -U postgres -d postgres -c "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'")
	[ "$writes" = t ]
	;;
*) exit 1 ;;
esac
