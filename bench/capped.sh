#!/usr/bin/env bash
# capped.sh LIMIT COMMAND...
#
# Runs COMMAND in a memory cgroup of its own with a hard limit (`8G`, bytes, `max`) that counts its memory and the
# pages of files that it brings into the cache, and says on stderr how much it took. Needs root. Version 1 and 2.
set -euo pipefail
limit=$1
shift

root=/sys/fs/cgroup
if grep -qw memory "$root/cgroup.controllers" 2>/dev/null; then
    group=$root/sakia-bench-$$
    mkdir "$group"
    limit_file=memory.max peak_file=memory.peak
    full() { awk '$1 == "max" { print $2 }' "$group/memory.events"; }
    [ -e "$group/$limit_file" ] || echo +memory >"$root/cgroup.subtree_control"
    [ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
else
    group=$root/memory/sakia-bench-$$
    mkdir "$group"
    limit_file=memory.limit_in_bytes peak_file=memory.max_usage_in_bytes
    full() { cat "$group/memory.failcnt"; }
fi
trap 'rmdir "$group" 2>/dev/null || true' EXIT
[ "$limit" = max ] || echo "$limit" >"$group/$limit_file"

status=0
(
    echo "$BASHPID" >"$group/cgroup.procs"
    exec "$@"
) || status=$?
echo "capped: limit $limit, peak $(($(cat "$group/$peak_file") >> 20)) MiB, limit met $(full) times" >&2
exit "$status"
