#!/usr/bin/env bash
# The servers that the stores are tested on: Redis and PostgreSQL, from the
# distribution's packages. What is missing is installed where that can be done.
set -euo pipefail
# shellcheck source=hack/debian.sh
source "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || packages+=(postgresql-15)
# What turns a server's clock, and what makes a network whose link can be cut.
compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || packages+=(faketime)
command -v ip >/dev/null || packages+=(iproute2)
need servers "the stores' tests need" "${packages[@]}"
