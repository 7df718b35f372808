#!/usr/bin/env bash
# Packs the compiled kernels of this host into folder OUT, in pieces that can be sent alone; most of an engine's start-up
# time is spent on making them. Put OUT into the bundle as .gpu-bundle/caches.
#   bash tools/gpu/save_caches.sh OUT
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
rm -f "$out"/caches.*
cd "$HOME"
# Triton, TileLang, Humming, the driver's own; .cache has vLLM's with DeepGEMM's, torch inductor's, FlashInfer's, TVM FFI's.
folders=()
for folder in .triton .tilelang .humming .nv .deep_gemm .cache/vllm .cache/torchinductor .cache/flashinfer .cache/tvm-ffi; do
    [ ! -d "$folder" ] || folders+=("$folder")
done
[ ${#folders[@]} -gt 0 ] || { echo "error: $HOME: found no caches of compiled kernels" >&2; exit 1; }
# Humming's scratch folder and locks of dead processes are of no use elsewhere.
tar --exclude='.humming/tmp' --exclude='*.lock' -cf - "${folders[@]}" | xz -T0 -5 | split -b 15M -d - "$out/caches.tar.xz."
(cd "$out" && sha256sum caches.tar.xz.* > caches.sha256)
echo "saved ${folders[*]}: $(du -sm "${folders[@]}" | awk '{s += $1} END {print s}') MB as $(cat "$out"/caches.tar.xz.* | wc -c) bytes"
