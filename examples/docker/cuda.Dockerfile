# fedvlm on an NVIDIA GPU. In the root of the repository: docker build -f examples/docker/cuda.Dockerfile -t fedvlm:cuda .
# torch's packages bring CUDA's libraries; the machine needs NVIDIA's driver and container toolkit.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY fedvlm fedvlm
RUN python -m venv /opt/fedvlm && /opt/fedvlm/bin/pip install --no-cache-dir '.[report,onnx,dp,secure]'

FROM python:3.12-slim
COPY --from=build /opt/fedvlm /opt/fedvlm
RUN useradd --uid 1000 --create-home fedvlm && install --directory --owner fedvlm /work
# nothing is fetched when it runs: weights and data are folders that are mounted
ENV PATH=/opt/fedvlm/bin:$PATH \
    FEDVLM_CACHE=/work/cache \
    FEDVLM_RUNS=/work/runs \
    HF_HUB_OFFLINE=1 \
    MPLCONFIGDIR=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["fedvlm"]
CMD ["--help"]
