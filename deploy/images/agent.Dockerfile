# nearkv-agent. Build from the root of the repository:
#   docker build -f deploy/images/agent.Dockerfile -t $REGISTRY/agent:$TAG .
# Pin PYTHON_IMAGE by digest for builds that are to be repeatable.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# For nearkv's one native module, which copies KV within a node. It would be left out in silence.
# Unpinned: the slim image goes along with Debian's security updates, and nothing of it is kept.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# The component folders are linked under src/nearkv: all of them go along, as they lie.
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY src src
COPY agent agent
COPY extender extender
COPY ingress ingress
COPY transfer transfer
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-compile ".[agent,gpu,ucx,store-redis]" \
    && /venv/bin/pip install --no-cache-dir --no-compile --no-deps "nixl-cu12>=1.5.1,<1.6" \
    && /venv/bin/python -c "import nearkv.transfer._copy"

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="nearkv-agent" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="node agent: block table, GPUs, links and KV transfer of one node"
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# The chart runs the agent as root without capabilities, and says why.
USER 65532:65532
ENTRYPOINT ["nearkv-agent"]
