#!/bin/sh
# Records a GPU machine that has neither this project's packages nor a network.
#
#   here:   tests/gpu/record.sh pack [PYTHON-VERSION]   puts the packages into .gpu-packages
#   there:  tests/gpu/record.sh [FOLDER]                records for a minute, then runs tests/gpu
#
# Both from the repository's root, .gpu-packages carried along. PYTHON-VERSION is that of the GPU
# machine's python3 (default 3.12). FOLDER (default .) gets nvml-recording.jsonl.gz, findings.txt
# and tests.txt.
set -eu

packages=.gpu-packages

pack() {
	rm -rf "$packages"
	.venv/bin/uv --quiet pip install --target "$packages" --python-version "$1" \
		--python-platform x86_64-unknown-linux-gnu --only-binary :all: \
		--constraints requirements/dev.lock \
		nvidia-ml-py msgspec orjson 'aiokafka[zstd]' aiohttp structlog prometheus_client pyyaml \
		typing_extensions grpclib protobuf bcrypt cyclopts rich pytest pytest-asyncio hypothesis
	# The project asks for its own version.
	cp -r .venv/lib/python3*/site-packages/gpuledger-*.dist-info "$packages/"
	# Only what running needs has to travel.
	find "$packages" -name __pycache__ -o -name '*.pyi' | xargs rm -rf
	du -sh "$packages"
}

record() {
	folder=$1
	mkdir -p "$folder"
	export PYTHONPATH="$PWD:$PWD/$packages"
	python=$(command -v python3)
	"$python" -m cli record-nvml --redact --seconds 60 --out "$folder/nvml-recording.jsonl.gz" \
		2>"$folder/findings.txt" || { cat "$folder/findings.txt" >&2; exit 1; }
	cat "$folder/findings.txt"
	"$python" -m pytest -p no:cacheprovider -q -rs tests/gpu 2>&1 | tee "$folder/tests.txt"
}

if [ "${1:-}" = pack ]; then
	pack "${2:-3.12}"
else
	record "${1:-.}"
fi
