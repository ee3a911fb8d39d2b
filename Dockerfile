# Nodes with NVIDIA GPUs: docker build -t rhymeflow . (docs/cluster.md)
#
# torch's wheels bring CUDA's libraries. The base has what they compile kernels with at run time:
# nvcc, a C compiler, Python's headers. The host's driver must support this version of CUDA.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc g++ python3 python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

# Login shells, which KubeRay starts, set PATH themselves.
ENV PATH=/opt/venv/bin:$PATH
RUN echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/venv.sh

# What is large, in a layer that a change of the source keeps: pyproject.toml's ranges.
RUN pip install --no-cache-dir \
        "torch>=2.10,<2.14" "transformers>=5.19,<5.20" "vllm>=0.32,<0.33" "ray[default]>=2.60,<2.61"

COPY LICENSE README.md pyproject.toml /src/
COPY rhymeflow /src/rhymeflow
RUN pip install --no-cache-dir "/src[math,ray,vllm,wandb]" s3fs gcsfs

# A volume has to let user 10001 write. `runs` is where runs begin if no directory is named.
RUN useradd --create-home --uid 10001 rhymeflow \
    && install --directory --owner=rhymeflow /home/rhymeflow/runs
USER rhymeflow
WORKDIR /home/rhymeflow
VOLUME /home/rhymeflow/runs
CMD ["rhymeflow", "doctor"]
