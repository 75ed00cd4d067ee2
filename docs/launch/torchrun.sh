#!/usr/bin/env bash
# One call on every node; the first one named in HEAD is where they meet. Arguments go to moetrain.
#
#   HEAD=node0 NODES=16 docs/launch/torchrun.sh --config configs/671B run_dir=/shared/runs/671B
#
# HEAD: host that every node reaches. NODES: how many. GPUS: processes a node (default: its GPUs, or 1).
# PORT: free on HEAD. RESTARTS: how often a run that lost a process is started again; it resumes from its last checkpoint.
set -euo pipefail
: "${HEAD:?the host where the nodes meet}" "${NODES:?how many nodes there are}"
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$gpus" -gt 0 ] || gpus=1
# SIGTERM: time to finish a window and to save, where torchrun's 30 seconds are too short for a large model
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-170}
# a store for each start: in one that is shared, a restarted process finds addresses of those that are gone, and hangs
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc_per_node "$gpus" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD:${PORT:-29400}" --rdzv_id "${RUN_ID:-moetrain}" \
    --max_restarts "${RESTARTS:-3}" \
    -m moetrain "$@"
