#!/usr/bin/env bash
# Runs golangci-lint at the version that this script names. The first run builds
# it from its Go module, which takes minutes; the program is then kept in the
# user's cache directory, under its version.
set -euo pipefail

version=v2.15.0

case $(go env GOHOSTOS) in
darwin) cache=${HOME:?}/Library/Caches ;;
*) cache=${XDG_CACHE_HOME:-${HOME:?}/.cache} ;;
esac
# The Go version is in the key: a linter built with an older Go refuses newer code.
dir=$cache/holdfast/golangci-lint/$version-$(go env GOVERSION)

if [[ ! -x $dir/golangci-lint ]]; then
	echo "lint: building golangci-lint $version, once; a minute or two on two cores" >&2
	mkdir -p "$dir"
	partial=$(mktemp -d "$dir/.partial-XXXXXX")
	build=
	trap 'kill $build 2>/dev/null || true; rm -rf "$partial"' EXIT
	start=$SECONDS
	(cd / && env GOFLAGS= GOWORK=off GOBIN="$partial" CGO_ENABLED=0 GOGC=400 \
		go install -trimpath -ldflags '-s -w' "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$version") \
		2> >(grep -v '^go: downloading' >&2) &
	build=$!
	until ! kill -0 "$build" 2>/dev/null; do
		sleep 1
		if (((SECONDS - start) % 30 == 29)); then
			echo "lint: still building golangci-lint, $((SECONDS - start))s" >&2
			sleep 1
		fi
	done
	wait "$build"
	# Only a whole program gets its name.
	mv "$partial/golangci-lint" "$dir/golangci-lint"
	rm -rf "$partial"
	trap - EXIT
	echo "lint: golangci-lint built, $((SECONDS - start))s" >&2
fi
exec "$dir/golangci-lint" "$@"
