# For scripts in Bash, which source it in the project's root.

# serve MODEL FOLDER NAME [OPTIONS]: vLLM until the script ends, its log in FOLDER; sets python and port, returns when it
# answers.
serve() {
  local model=$1 folder=$2 name=$3 log=$2/vllm.log
  shift 3
  python=.venv/bin/python
  mkdir -p "$folder"
  port=$($python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

  $python -m agentic_opd.serving.launch "$model" --port "$port" "$@" >"$log" 2>&1 &
  server=$!
  stop() { kill "$server" 2>/dev/null && wait "$server" 2>/dev/null || true; }
  trap stop EXIT
  trap 'exit 130' INT TERM

  printf 'Starting vLLM with %s (log: %s) ' "$name" "$log" >&2
  until $python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || { printf '\nerror: vLLM did not start:\n' >&2; tail -n 20 "$log" >&2; exit 1; }
    printf . >&2
    sleep 1
  done
  printf ' ready\n' >&2
}
