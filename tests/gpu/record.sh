#!/bin/sh
# Records a GPU machine that has neither this project's packages nor a network.
#
#   here:   tests/gpu/record.sh pack [PYTHON-VERSION]   puts the packages into .gpu-packages.tar.xz
#   there:  tests/gpu/record.sh [FOLDER]                records under load, runs tests/gpu and the demo
#
# Both from the repository's root, .gpu-packages.tar.xz carried along. PYTHON-VERSION is that of the GPU
# machine's python3 (default 3.12). FOLDER (default .) gets nvml-recording.jsonl.gz, findings.txt,
# tests.txt, demo.txt, demo.json and agent.txt. It takes about five minutes.
#
# The load is this script's own: one process computes from the 8th second on, and a second one beside it
# from the 18th, so that a recording has a GPU that is idle, one process's, and shared.
set -eu

packed=.gpu-packages.tar.xz
python=$(command -v python3)

pack() {
	made=$(mktemp -d)
	.venv/bin/uv --quiet pip install --target "$made" --python-version "$1" \
		--python-platform x86_64-unknown-linux-gnu --only-binary :all: \
		--constraints requirements/dev.lock --requirement requirements/demo.lock
	.venv/bin/uv --quiet pip install --target "$made" --python-version "$1" \
		--python-platform x86_64-unknown-linux-gnu --only-binary :all: \
		--constraints requirements/dev.lock pytest pytest-asyncio pytest-xdist hypothesis
	# The project asks for its own version.
	cp -r .venv/lib/python3*/site-packages/gpuledger-*.dist-info "$made/"
	# Only what running needs has to travel.
	find "$made" \( -name __pycache__ -o -name '*.pyi' -o -name obstore -o -name tests \) -prune -exec rm -rf {} +
	find "$made" -name '*.so' -exec strip --strip-unneeded {} +
	XZ_OPT='-9 -T1' tar -C "$made" -cJf "$packed" .
	rm -rf "$made"
	du -sh "$packed"
}

# Keep the GPU busy in two processes that want it at once, until they are ended.
load() {
	(sleep 8; exec "$python" -m tests.gpu.load --busy 0.5 --from 0.0 --hold-bytes 1073741824 --seconds 130) &
	first=$!
	(sleep 18; exec "$python" -m tests.gpu.load --busy 0.6 --from 0.2 --hold-bytes 3221225472 --seconds 120) &
	second=$!
}

unload() {
	kill "$first" "$second" 2>/dev/null || true
	wait "$first" "$second" 2>/dev/null || true
}

record() {
	load
	"$python" -m gpuledger_cli record-nvml --redact --for 60s --output "$1/nvml-recording.jsonl.gz" \
		2>"$1/findings.txt" || { cat "$1/findings.txt" >&2; unload; exit 1; }
	unload
	cat "$1/findings.txt"
}

demo() {
	load
	"$python" -m gpuledger_cli demo --for 40s >"$1/demo.txt" 2>&1 || true
	cat "$1/demo.txt"
	unload
	load
	"$python" -m gpuledger_cli demo --for 30s --format json >"$1/demo.json" 2>"$1/demo.stderr.txt" || true
	unload
}

# What the agent alone shows, and what it costs a minute after its start.
agent() {
	load
	NODE_NAME=gpu-machine "$python" -m gpuledger_agent --no-kafka --listen 127.0.0.1:9400 >"$1/agent.log" 2>&1 &
	pid=$!
	sleep 45
	"$python" - "$pid" >"$1/agent.txt" 2>&1 <<'PYTHON' || true
import os, sys, time, urllib.request
pid = sys.argv[1]
def ticks():
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
began, used = time.monotonic(), ticks()
time.sleep(20)
print(f"# of a core: {(ticks() - used) / (time.monotonic() - began):.4f}")
print("#", *[line.strip() for line in open(f"/proc/{pid}/status") if line.startswith(("VmRSS", "RssAnon", "Threads"))])
print(urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=10).read().decode())
PYTHON
	kill "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	unload
	head -2 "$1/agent.txt"
}

if [ "${1:-}" = pack ]; then
	pack "${2:-3.12}"
else
	folder=${1:-.}
	mkdir -p "$folder"
	unpacked=$(mktemp -d)
	trap 'rm -rf "$unpacked"' EXIT
	tar -C "$unpacked" -xJf "$packed"
	export PYTHONPATH="$PWD:$unpacked" PYTHONUNBUFFERED=1
	record "$folder"
	"$python" -m pytest -p no:cacheprovider -q -rs -s tests/gpu >"$folder/tests.txt" 2>&1 || true
	cat "$folder/tests.txt"
	agent "$folder"
	demo "$folder"
fi
