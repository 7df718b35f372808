#!/usr/bin/env bash
# Takes parts of the bundle that tools/gpu/make_bundle.py wrote, on the GPU host, and installs it once all are there:
#   bash tools/gpu/unpack.sh .gpu-bundle/part1      # and so on, one or several at a time, in any order
#   . /tmp/specialized-decode/env.sh
# A folder `project` (the project's wheel) or `caches` (of tools/gpu/save_caches.sh) is taken in the same way. Every file
# is checked against its sum. Run again after an interruption: what is done is not done again.
set -euo pipefail
root=${SPECIALIZED_DECODE_GPU:-/tmp/specialized-decode}
store=$root/store site=$root/site
mkdir -p "$store" "$site"

for folder in "$@"; do
    [ -d "$folder" ] || { echo "error: $folder: found no folder, expected a part of the bundle" >&2; exit 1; }
    for sums in "$folder"/*.sha256; do
        # Of a part's list, only the part's own files are here; what is here must match.
        (cd "$folder" && sha256sum --quiet --check --ignore-missing "$(basename "$sums")") ||
            { echo "error: $folder: damaged; send it again" >&2; exit 1; }
        cp "$sums" "$store/"
    done
    for file in "$folder"/*; do
        case $file in *.sha256) continue ;; esac
        grep -q "  $(basename "$file")\$" "$folder"/*.sha256 ||
            { echo "error: $file: found no sum of it" >&2; exit 1; }
        # By a rename, so that a file of the store is whole.
        cp "$file" "$store/.arriving" && mv "$store/.arriving" "$store/$(basename "$file")"
    done
done

missing=()
[ -e "$store/bundle.sha256" ] || missing=("every part")
for sums in "$store"/*.sha256; do
    [ -e "$sums" ] || continue
    while read -r _ name; do
        [ -e "$store/$name" ] || missing+=("$name")
    done < "$sums"
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "taken; still to come: ${missing[*]}"
    exit 0
fi

# Unpacks the pieces of archive $1, whose sums are in list $2, into folder $3.
unpack() {
    local name=$1 sums=$2 target=$3 state
    state=$(grep "  $name.tar.xz\." "$sums" | sha256sum | cut -c1-16)
    [ "$(cat "$store/$name.done" 2>/dev/null)" != "$state" ] || return 0
    mkdir -p "$target"
    # The list's order is the pieces' order.
    grep -o "$name.tar.xz\.[0-9]*" "$sums" | (cd "$store" && xargs cat) | xz -dc -T0 | tar -C "$target" -xf -
    echo "$state" > "$store/$name.done"
}

jobs=()
mapfile -t archives < <(sed -n 's/.*  \(.*\)\.tar\.xz\.00$/\1/p' "$store/bundle.sha256")
for name in "${archives[@]}"; do
    unpack "$name" "$store/bundle.sha256" "$site" &
    jobs+=($!)
done
if [ -e "$store/caches.sha256" ]; then
    unpack caches "$store/caches.sha256" "$HOME" &
    jobs+=($!)
fi
for job in "${jobs[@]}"; do wait "$job"; done

if [ -e "$store/project.sha256" ]; then
    rm -rf "$root/project"
    mkdir "$root/project"
    while read -r _ name; do
        python3 -m zipfile -e "$store/$name" "$root/project"
    done < "$store/project.sha256"
fi

# The project's folder holds its metadata, without which vLLM does not find the plugin. Caches lie under HOME, where
# tools/gpu/save_caches.sh takes them from.
cat > "$root/env.sh" <<EOF
export PYTHONPATH=$root/project:$site:$site/nvidia_cutlass_dsl/dsl_packages\${PYTHONPATH:+:\$PYTHONPATH}
export TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/torchinductor
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
EOF
echo "installed $(du -sm "$site" | cut -f1) MB in $site; next: . $root/env.sh"
