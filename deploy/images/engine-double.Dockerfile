# The tests' double of an engine: speaks vLLM's HTTP, metrics and KV events, computes nothing.
# For trying nearkv out without GPUs (deploy/kind); never for anything else.
#   docker build -f deploy/images/engine-double.Dockerfile -t nearkv.local/engine-double:0.1.0 .
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY src src
COPY agent agent
COPY extender extender
COPY ingress ingress
COPY transfer transfer
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-compile ".[agent,ingress]"

FROM ${PYTHON_IMAGE}
COPY --from=build /venv /venv
COPY tests/__init__.py /app/tests/__init__.py
COPY tests/doubles /app/tests/doubles
COPY tests/data/vllm /app/tests/data/vllm
WORKDIR /app
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "tests.doubles.engine"]
