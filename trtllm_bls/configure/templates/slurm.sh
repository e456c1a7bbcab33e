set -euo pipefail
export SERVER="${SERVER:-/opt/tritonserver/bin/tritonserver}"
# Rank 0 serves; the others load the engines alone and end with it.
srun --mpi=pmix --kill-on-bad-exit=1 bash -c '
  role=""
  [ "$SLURM_PROCID" = 0 ] || role="--model-control-mode=explicit $LOAD_ENGINES"
  # Any client could otherwise read other requests or switch the log off. Triton asks for a header
  # that nobody can send: its name has blanks, its value a line feed.
  rule="shared-memory,model-repository,logging,trace:closed by serve=closed
by serve"
  exec "$SERVER" --model-repository="$REPOSITORY" --disable-auto-complete-config \
    --http-restricted-api="$rule" --grpc-restricted-protocol="$rule" \
    --grpc-header-forward-pattern="traceparent|triton_grpc_error" \
    --backend-config=python,thread-pool-size="$THREADS" \
    --backend-config=python,shm-region-prefix-name="prefix${SLURM_PROCID}_" $role
'
