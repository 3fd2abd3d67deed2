"""Settings of the launcher. They apply to all verbs of `bash launch.sh`."""

SETTINGS = {
    "ssh": "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3",
    # Variables of this shell that reach all machines; they travel inside ssh, on no command line.
    "forward": [
        "HF_*", "HUGGING_FACE_*", "NCCL_*", "GLOO_*", "OMP_*", "KMP_*", "MKL_*", "MALLOC_*", "TORCH*", "PYTORCH_*",
        "TRITON_*", "CUDA_*", "FI_*", "UCX_*", "WANDB_*", "*_proxy", "*_PROXY", "LD_LIBRARY_PATH",
    ],
    "port": 0,  # of the rendezvous on the first machine; 0 = a free one. Behind a firewall: an open one
    "meet": 900,  # seconds for torchrun to start everywhere, from disks that may be slow; later starts have 120
    "retries": 3,  # on several machines: relaunches without a newer checkpoint
    "retry_pause": 20,  # seconds before the first of them; doubles each time
}  # fmt: skip
