# A population in a container: `docker build -t populora .`, then `docker run --rm -v populora:/runs populora`.
# On a GPU: `docker build --build-arg TORCH_INDEX= -t populora .` takes PyPI's torch, `docker run --gpus all ...`.
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV OMP_NUM_THREADS=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . /src
RUN pip install ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} "/src[report]" && rm -r /src
# An ordinary user: the sandbox then needs nothing that Docker's default profile forbids (level B).
RUN useradd --uid 1000 --create-home populora && mkdir /runs && chown populora /runs
USER populora
WORKDIR /
ENTRYPOINT ["populora"]
CMD ["quickstart", "--output_dir", "/runs/quickstart"]
