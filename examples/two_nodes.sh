#!/usr/bin/env bash
# One model over two machines. Run it on both, the first with rank 0:
#
#   examples/two_nodes.sh 0 10.0.0.1 eth0 example_text_completion.py --ckpt_dir DIR --tokenizer_path FILE
#   examples/two_nodes.sh 1 10.0.0.1 eth0 example_text_completion.py --ckpt_dir DIR --tokenizer_path FILE
#
# RANK is the machine's number, ADDRESS the first machine's address, CARD the network card that leads to the other
# machine (`ip route get ADDRESS` names it). Both need the same code, checkpoint and torch; the checkpoint may lie on
# each machine's own disk. RANKS_HERE (1) is the number of ranks, and GPUs, on each machine; PORT (29500) must be open
# on the first machine, and the machines must reach each other on any port. The first machine prints.
set -eu
if [ $# -lt 4 ]; then
    echo "usage: $0 RANK ADDRESS CARD PROGRAM [ARGUMENTS]" >&2
    exit 2
fi
rank=$1 address=$2 card=$3
shift 3

# Without these each side offers the address that its own host name resolves to, which often is 127.0.0.1.
export GLOO_SOCKET_IFNAME="$card" NCCL_SOCKET_IFNAME="$card"

exec "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --node_rank "$rank" --nproc_per_node "${RANKS_HERE:-1}" \
    --master_addr "$address" --master_port "${PORT:-29500}" "$@"
