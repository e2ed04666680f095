# For scripts that need Debian's packages: `need WHO WHAT PACKAGE...` installs them where that can be done,
# and where it cannot says for WHO that WHAT needs them. Nothing happens where none is named.
need() {
	local who=$1 what=$2
	shift 2
	(($#)) || return 0
	if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
		echo "$who: $what $*: install them (Debian: sudo apt-get install $*)" >&2
		return 1
	fi
	echo "$who: installing $*"
	# Only the programs are wanted: whoever needs them starts servers of its own.
	policy=/usr/sbin/policy-rc.d
	if [[ ! -e $policy ]]; then
		trap 'rm -f "$policy"' EXIT
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod +x "$policy"
	fi
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
