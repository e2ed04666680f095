#!/usr/bin/env bash
# The servers that the stores are tested on: Redis and PostgreSQL, from the
# distribution's packages. What is missing is installed where that can be done.
set -euo pipefail

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || packages+=(postgresql-15)
# What turns a server's clock, and what makes a network whose link can be cut.
compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || packages+=(faketime)
command -v ip >/dev/null || packages+=(iproute2)
((${#packages[@]})) || exit 0

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
	echo "servers: the stores' tests need ${packages[*]}: install them (Debian: sudo apt-get install ${packages[*]})" >&2
	exit 1
fi
echo "servers: installing ${packages[*]}"
# Only the programs are wanted: each test starts servers of its own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
