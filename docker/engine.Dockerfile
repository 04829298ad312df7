# The engine on GPUs, on vLLM's own image, whose torch, CUDA and vLLM it takes as they are. Only what clora needs beyond
# them is added, by hash and without dependencies. Build from the repository's root:
#   docker build -f docker/engine.Dockerfile -t clora-engine:0.1.0 .
ARG VLLM=v0.33.0
FROM python:3.11-slim AS wheel
WORKDIR /src
COPY requirements/build.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM vllm/vllm-openai:${VLLM}
COPY requirements/engine-on-vllm.txt /tmp/
COPY --from=wheel /dist /tmp/dist
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r /tmp/engine-on-vllm.txt \
 && python3 -m pip install --no-cache-dir --no-deps /tmp/dist/clora-*.whl \
 && rm -r /tmp/engine-on-vllm.txt /tmp/dist \
 && mkdir -p /home/clora && chown 10001:10001 /home/clora
ENV HOME=/home/clora PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Fails the build where a dependency is missing.
RUN clora-engine serve --help >/dev/null
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["clora-engine"]
