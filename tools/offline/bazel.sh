#!/usr/bin/env bash
# Runs Bazel 7 on a Debian machine that reaches Debian's packages and nothing else:
#   SPECIALIZED_DECODE_PYTHON=/path/to/venv/bin/python tools/offline/bazel.sh test //...
# Debian 12 has Bazel 4 only, so Bazel 7 and its rule sets come from a later release's packages, in a
# root folder of their own that this machine's packages never mix with. Bazel runs in that root; the
# tests and the wheel's build run on this machine's own files.
#   OFFLINE_BAZEL_ROOT    the root folder; the build outputs lie in its output/
#   OFFLINE_BAZEL_MIRROR  the Debian mirror, when apt does not know one
# shellcheck disable=SC2016  # the quoted scripts expand their own variables
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
root=${OFFLINE_BAZEL_ROOT:-/var/cache/specialized-decode-bazel}
suite=forky
packages=(bazel-bootstrap bazel-rules-python bazel-rules-cc bazel-rules-java bazel-rules-license
          bazel-skylib bazel-features bazel-platforms)

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

bootstrap() {
    local mirror missing=()
    export DEBIAN_FRONTEND=noninteractive
    [ -x /usr/sbin/debootstrap ] || missing+=(debootstrap)
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update -q
        apt-get install -y -q --no-install-recommends "${missing[@]}"
    fi
    mirror=${OFFLINE_BAZEL_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' | head -n 1)}
    [ -n "$mirror" ] || fail "apt knows no Debian mirror; set OFFLINE_BAZEL_MIRROR"

    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
        "$suite" "$root" "$mirror" /usr/share/debootstrap/scripts/sid
    cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    chroot "$root" apt-get update -q
    # A package's script must not start services.
    printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
    chmod +x "$root/usr/sbin/policy-rc.d"
    unshare --mount --propagation private bash -c '
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        exec chroot "$0" apt-get install -y -q --no-install-recommends "$@"
    ' "$root" "${packages[@]}"
    chroot "$root" apt-get clean
    touch "$root/.ready"
}

[ "$(id -u)" -eq 0 ] || fail "needs root, for a root folder of its own"
python=${SPECIALIZED_DECODE_PYTHON:?set it to the Python that has the test dependencies}
case $root in
    /*) ;;
    *) fail "OFFLINE_BAZEL_ROOT=$root is not an absolute path" ;;
esac

if [ "${OFFLINE_BAZEL_STEP:-}" = bootstrap ]; then
    bootstrap
    exit
fi

# Checkouts share the root, and the first one to come makes it.
mkdir -p "$(dirname "$root")"
exec 8> "$root.lock"
flock 8
if [ ! -e "$root/.ready" ]; then
    log=$root.log
    # A process of its own, because `set -e` does not hold in a function whose result is tested.
    if ! OFFLINE_BAZEL_STEP=bootstrap "${BASH_SOURCE[0]}" < /dev/null > "$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "Debian's Bazel could not be installed into $root; the whole log is $log"
    fi
fi
mkdir -p "$root/host" "$root/output"
exec 8>&-

# The mounts live in a namespace of their own and end with it. --batch leaves no server behind that
# would keep it alive. The repository and the outputs have the same path inside and outside.
exec unshare --mount --propagation private bash -c '
    set -eu
    root=$1 repo=$2 python=$3
    shift 3
    inner=/run/specialized-decode
    mount --rbind / "$root/host"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs tmpfs "$root/run"
    for path in "$repo" "$root/output"; do
        mkdir -p "$root$path"
        mount --bind "$path" "$root$path"
    done
    mkdir "$root$inner"
    printf "#!/bin/sh\nexec unshare --root=/host --wd=\"\$PWD\" \"%s\" \"\$@\"\n" "$python" > "$root$inner/python"
    chmod +x "$root$inner/python"
    cd /
    exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        SPECIALIZED_DECODE_PYTHON="$inner/python" \
        bash -c "cd \"\$1\" && shift && exec bazel \"\$@\"" bash "$repo" --batch \
        --output_user_root="$root/output" --bazelrc=tools/offline/debian.bazelrc "$@"
' bash "$root" "$repo" "$python" "$@"
