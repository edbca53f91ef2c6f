# fedvlm on the CPU. In the root of the repository: docker build -f examples/docker/cpu.Dockerfile -t fedvlm:cpu .
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints-cpu.txt pyproject.toml README.md LICENSE NOTICE ./
COPY fedvlm fedvlm
RUN python -m venv /opt/fedvlm \
    && /opt/fedvlm/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" --requirement constraints-cpu.txt \
    && /opt/fedvlm/bin/pip install --no-cache-dir --constraint constraints-cpu.txt '.[report,onnx,dp,secure]'

FROM python:3.12-slim
COPY --from=build /opt/fedvlm /opt/fedvlm
RUN useradd --uid 1000 --create-home fedvlm && install --directory --owner fedvlm /work
# nothing is fetched when it runs: weights and data are folders that are mounted
ENV PATH=/opt/fedvlm/bin:$PATH \
    FEDVLM_CACHE=/work/cache \
    FEDVLM_RUNS=/work/runs \
    HF_HUB_OFFLINE=1 \
    MPLCONFIGDIR=/tmp
USER 1000
WORKDIR /work
ENTRYPOINT ["fedvlm"]
CMD ["--help"]
