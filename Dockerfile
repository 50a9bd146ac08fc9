# Two images: docker build --target agent --tag gpuledger-agent:0.1.0 . and docker build --target gpuledger --tag gpuledger:0.1.0 .
# The agent's is small, because it runs on every GPU node. The other one has all components and commands.
#
#   base ── tools ── wheel                    the distribution, built once from the checkout; its hot modules are
#     │       │                               compiled for one architecture and one Python version
#     │       └───── agent-environment        one virtual environment per lock file, with exact versions and checked
#     │              gpuledger-environment    hashes; the wheel comes last, so a code change reinstalls only the wheel
#     └── runtime ── agent gpuledger
#
# The final images contain Python and one environment, without build tools. They run under a numeric user id, so that
# Kubernetes can check `runAsNonRoot`. They write only to mounted volumes.
# The tag is for readers; the digest, of the index of all architectures, selects the image. Update both together.
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM base AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never \
    VIRTUAL_ENV=/opt/gpuledger
WORKDIR /build
COPY requirements/bootstrap.lock requirements/
RUN ["python", "-m", "pip", "install", "--require-hashes", "--requirement", "requirements/bootstrap.lock"]
RUN ["uv", "venv", "/opt/gpuledger"]

FROM tools AS wheel
# Python's headers are in the base image; the compiler stays in this stage.
RUN ["apt-get", "update"]
RUN ["apt-get", "install", "--yes", "--no-install-recommends", "gcc", "libc6-dev"]
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY gpuledger gpuledger
COPY agent agent
COPY enricher enricher
COPY sinks sinks
COPY reports reports
COPY simulator simulator
COPY cli cli
RUN ["python", "-m", "hatchling", "build", "--target", "wheel", "--directory", "/wheels"]

# uv compiles to bytecode here, because the final images run read-only.
FROM tools AS agent-environment
COPY requirements/agent.lock requirements/
RUN ["uv", "pip", "install", "--compile-bytecode", "--require-hashes", "--requirement", "requirements/agent.lock"]
COPY --from=wheel /wheels /wheels
RUN ["uv", "pip", "install", "--compile-bytecode", "--no-deps", "--no-index", "--find-links", "/wheels", "gpuledger"]

FROM tools AS gpuledger-environment
COPY requirements/demo.lock requirements/
RUN ["uv", "pip", "install", "--compile-bytecode", "--require-hashes", "--requirement", "requirements/demo.lock"]
COPY --from=wheel /wheels /wheels
RUN ["uv", "pip", "install", "--compile-bytecode", "--no-deps", "--no-index", "--find-links", "/wheels", "gpuledger"]

FROM base AS runtime
# A new named volume gets the owner of the directory at its mount point.
RUN ["install", "--directory", "--owner=65532", "--group=65532", "/var/lib/gpuledger", "/var/spool/gpuledger"]
ENV PATH=/opt/gpuledger/bin:$PATH
LABEL org.opencontainers.image.title="gpuledger" \
      org.opencontainers.image.description="For every GPU and every second: who used it, how much, and how we know." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /var/lib/gpuledger
USER 65532:65532

FROM runtime AS agent
# One malloc arena for all threads: the GIL serializes them, and an arena per thread costs 0.4 MiB of memory each.
ENV MALLOC_ARENA_MAX=1
# These make NVIDIA's container runtime add all GPUs and the driver's library, as in dcgm-exporter's image.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=utility
COPY --from=agent-environment /opt/gpuledger /opt/gpuledger
EXPOSE 9820
ENTRYPOINT ["gpuledger", "agent"]

FROM runtime AS gpuledger
COPY --from=gpuledger-environment /opt/gpuledger /opt/gpuledger
COPY scenarios /usr/share/gpuledger/scenarios
ENTRYPOINT ["gpuledger"]
