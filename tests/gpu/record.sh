#!/bin/sh
# Records a GPU machine that has no network and none of this project's packages.
#
#   here:   tests/gpu/record.sh pack [PYTHON-VERSION]   packs the packages into .gpu-packages.tar.xz
#   there:  tests/gpu/record.sh [DIRECTORY]             records under load, runs tests/gpu and the demo
#
# Run both from the repository's root, and copy .gpu-packages.tar.xz to the GPU machine. PYTHON-VERSION
# is the version of its python3 (default 3.12). DIRECTORY (default .) receives nvml-recording.jsonl.gz,
# findings.txt, tests.txt, demo.txt, demo.json and agent.txt. It takes about five minutes.
#
# The script makes its own load: one process computes from second 8, and another one from second 18, so
# that a recording contains an idle GPU, a GPU with one process, and a shared one.
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
	# The project reads its own version from this metadata.
	cp -r .venv/lib/python3*/site-packages/gpuledger-*.dist-info "$made/"
	# Remove everything that is not needed at run time.
	find "$made" \( -name __pycache__ -o -name '*.pyi' -o -name obstore -o -name tests \) -prune -exec rm -rf {} +
	find "$made" -name '*.so' -exec strip --strip-unneeded {} +
	XZ_OPT='-9 -T1' tar -C "$made" -cJf "$packed" .
	rm -rf "$made"
	du -sh "$packed"
}

# Keep the GPU busy with two processes at the same time, until unload.
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

# The agent's page and its CPU and memory use, about a minute after its start.
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
