# trp_scale in an image, for GPUs or without them. The wheel of torch brings CUDA's runtime along; a GPU needs NVIDIA's
# container toolkit on the host. g++ is for deepspeed's and torch.compile's own kernels.
#
#   docker build -t trp-scale .
#   docker build -t trp-scale:cpu --build-arg DEVICE=cpu .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/work trp-scale pretrain --recipe mae_vit_b --data.path data
FROM python:3.12-slim-bookworm

ARG DEVICE=cuda
ARG EXTRAS=deepspeed,vision,wandb,tensorboard,datasets,text,pictures,evaluation,remote

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/trp-scale
COPY pyproject.toml constraints.txt Makefile LICENSE README.md ./
COPY trp_scale trp_scale
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 make setup DEVICE="$DEVICE" EXTRAS="$EXTRAS"

ENV PATH=/opt/trp-scale/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["trp-scale"]
CMD ["--help"]
