#!/usr/bin/env bash
# On the GPU machine, from the root of the tree that was carried there. Usage: on_gpu.sh rehearse|start|poll SECONDS|close
set -u
CODE=$(cd "$(dirname "$0")/../.." && pwd); R=/root/r; D=/root/d
export PYTHONPATH=$CODE/src:$CODE PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
nvidia-cuda-mps-control -d 2>/dev/null || true
case "$1" in
rehearse)  # every kind of job once, at a tiny size
  P=/root/rehearsal; rm -rf $P; python3 -m benchmarks.forgetting.plan $P; cd $P/queue
  grep -L '"seed": 1' *.json | xargs rm; sed -i 's/"relearn": [1-9][0-9]*/"relearn": 1/; s/"epochs": [0-9]*/"epochs": 2/' *.json; touch $P/closed
  timeout 150 python3 -m benchmarks.forgetting.work $P $D --workers 10 --epochs 2 --limit 10000
  wc -l $P/results.jsonl; head -c 4000 $P/errors.log; cut -c1-900 $P/results.jsonl | tail -n 3; cp $P/results.jsonl "$OUT/rehearsal.jsonl" ;;
start)
  mkdir -p $R; [ -d "${3:-}" ] && cp -r "$3"/. $R/; python3 -m benchmarks.forgetting.plan $R
  setsid nohup python3 -m benchmarks.forgetting.work $R $D --workers "${2:-10}" > $R/log 2>&1 < /dev/null & ;;
add)  # more jobs, from a file of JSON lines
  python3 -c "
import sys, json; from pathlib import Path; from benchmarks.forgetting.plan import write
print(write(Path('$R'), map(json.loads, open('$2')), int('$3')))" ;;
poll)
  for i in $(seq "$2"); do [ -e $R/closed ] && [ -z "$(ls $R/queue)" ] && ! pgrep -f benchmarks.forgetting.work > /dev/null && break; sleep 1; done
  ls $R/queue | wc -l; wc -l $R/results.jsonl; ls $R/networks; tail -n 5 $R/log; head -c 3000 $R/errors.log 2>/dev/null
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
  cp $R/results.jsonl "$OUT/"; cp $R/errors.log "$OUT/" 2>/dev/null; tar -C $R -czf "$OUT/networks.tgz" networks ;;
close) touch $R/closed ;;
esac
