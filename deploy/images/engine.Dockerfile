# vLLM with nearkv's connector. Build from the root of the repository:
#   docker build -f deploy/images/engine.Dockerfile -t $REGISTRY/vllm-nearkv:$TAG .
# The connector needs nothing that vLLM does not bring, so nothing of vLLM's is changed.
ARG PYTHON_IMAGE=python:3.12-slim
# Tested with 0.32 (docs/upgrades.md); the wheel is built for any Python from 3.11 on.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY src src
COPY agent agent
COPY extender extender
COPY ingress ingress
COPY transfer transfer
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vllm-nearkv" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="vLLM with the connector that hands KV to nearkv's node agent"
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl
