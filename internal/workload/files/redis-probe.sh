# Asks the server how it is, as a user who may ask nothing else.
#   alive: it answers, whatever it answers. A server that still loads its log does: to kill it would only
#          have it begin again.
#   ready: it has loaded its log, writes it, and the last write of it did not fail.
set -eu
cli=redis-cli
if command -v valkey-cli >/dev/null; then cli=valkey-cli; fi
REDISCLI_AUTH=$(cat /etc/holdfast-secret/probe-password)
export REDISCLI_AUTH
ask() { "$cli" -h 127.0.0.1 -p 6379 ${PROBE_TLS:-} --user probe --no-auth-warning "$@" 2>&1; }

case "$1" in
alive)
	answer=$(ask PING) || true
	case "$answer" in
	*PONG* | *LOADING* | *BUSY* | *MISCONF* | *NOAUTH* | *NOPERM* | *WRONGPASS*) exit 0 ;;
	esac
	;;
ready)
	answer=$(ask INFO persistence | tr -d '\r') || true
	has() { printf '%s\n' "$answer" | grep -qx "$1"; }
	if has 'loading:0' && has 'aof_enabled:1' && has 'aof_last_write_status:ok'; then exit 0; fi
	;;
esac
echo "not $1: $answer" | head -c 500
exit 1
