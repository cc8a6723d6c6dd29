from setuptools import find_packages, setup

setup(name="hybridrl", version="0.1.0", packages=find_packages(include=["hybridrl*", "recipes*"]), python_requires=">=3.11")
