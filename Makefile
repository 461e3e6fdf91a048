# Commands for a fresh machine with Python and make: `make demo`, `make test`, `make test-matrix`.
# Each makes the virtual environments it needs under .venv/ (a few minutes, once) and says so.

PYTHON ?= python3
NEMO_VERSIONS ?= 3.0.0 2.7.3
PYTHONS ?= 3.10 3.12 3.13
TORCHES ?= 2.6.0 2.15.0
LIGHTNINGS ?= 2.5.6 2.6.0
WRAPTS ?= 1.14.2 2.0.0
DEMO_NEMO = 3.0.0
# The last release of each series that is supported (nemo_patches/patching/admission.py); tests/test_supported.py compares.
MATRIX = 2.1.0 2.2.1 2.3.3 2.4.1 2.5.3 2.6.2 2.7.3 3.0.0
# A release without an environment of its own runs in this one's: only NeMo itself is older there, not what it needs.
MATRIX_HOST = 2.7.3
UNPACK = .venv/nemo-$(MATRIX_HOST)/bin/python -m pip install -q --no-compile --no-deps --upgrade --target

# One diff for each series, made from its last release; `make patches` makes them all anew, and CI compares.
PATCHES = 1.23.0 2.0.0 $(MATRIX)
series = $(word 1,$(subst ., ,$1)).$(word 2,$(subst ., ,$1))

# Each test starts processes, and each would compile the tests and all of ours anew.
unexport PYTHONDONTWRITEBYTECODE
# No: pip would compile all 310 MB of NeMo's environment, for two minutes of CPU; an import compiles what it needs.
export PIP_COMPILE = 0

.PHONY: help demo demo-picture check test test-hosts test-% test-others test-wheel test-pythons test-nemo-pythons test-torch test-lightning test-wrapt build-wheel test-matrix $(MATRIX:%=matrix-%) test-vendored $(MATRIX:%=vendored-%)
.PHONY: benchmark benchmark-start-up patches $(PATCHES:%=patch-%) check-patches patches-table
.PHONY: lint lint-with-torch golden clean
.PRECIOUS: .venv/nemo-python-%/ready .venv/with-%/ready .venv/nemo-%/nemo .venv/nemo-%/ready .venv/unpacked/nemo-%/ready

help:
	@echo "make demo       stock NeMo against NeMo with nemo_patches, on this machine's CPU"
	@echo "make demo-picture  the same, and docs/pictures/demo.svg anew"
	@echo "make check      lint, and the tests that need neither torch nor NeMo, for every day"
	@echo "make test       lint, types, and all tests, on NeMo $(NEMO_VERSIONS)"
	@echo "make test-hosts  jobs on several hosts, made of namespaces (root, iproute2, iptables): what fails there, and who is named"
	@echo "make test-wheel  the wheel built, checked, and tested where neither NeMo nor torch is"
	@echo "make test-pythons  the same on Python $(PYTHONS), if python<version> runs each"
	@echo "make test-nemo-pythons  the main tests with NeMo on the same Pythons"
	@echo "make test-torch  the sync, growth, exit, peers, stall and auto-apply tests on torch $(TORCHES); make test-lightning on Lightning $(LIGHTNINGS); make test-wrapt on wrapt $(WRAPTS)"
	@echo "make test-matrix  a selection of the tests on NeMo $(MATRIX)"
	@echo "make test-slurm  the commands and what Slurm leaves behind, on a real Slurm of namespaces; needs root and Debian's packages"
	@echo "make test-vendored  the scenarios on NeMo with its diff, without nemo_patches, on the same releases"
	@echo "make patches    make patches/ anew; make check-patches compares"
	@echo "make golden     tests/golden anew: all that each command prints, for its inputs there"
	@echo "make benchmark  ratios against stock"
	@echo "make benchmark-start-up  what auto-apply costs a Python process at its start"
	@echo "make patches-table  a table: patches/ against every release of NeMo on PyPI"
	@echo "make docs       the documents' site, in .venv/site; a link that leads nowhere is an error"
	@echo "make screenshots  the same, and its pages as a browser here shows them on a desktop and on a phone, in .venv/screenshots"
	@echo "make stacks.pyz  the command \`nemo-patches stacks --json\` in one file, .venv/stacks.pyz, for where only Python is"
	@echo "make check-tag TAG=v0.2.0  whether a release's tag is this version's"
	@echo "make reference  docs/reference.md's tables and API anew, from the code"
	@echo "make pictures   docs/pictures/stall.png anew, with an installed Chromium or Chrome"
	@echo "make clean      remove .venv/"

demo: .venv/nemo-$(DEMO_NEMO)/ready
	.venv/nemo-$(DEMO_NEMO)/bin/nemo-patches demo

# The picture in the documents, from a run of this machine's.
demo-picture: .venv/nemo-$(DEMO_NEMO)/ready
	mkdir -p docs/pictures
	.venv/nemo-$(DEMO_NEMO)/bin/nemo-patches demo --record docs/pictures/demo.svg

# First what takes longest to install; then what does not wait, beside the checks; then the tests that wait (marker
# "alone"), three files at a time, beside those of the wheel and of the other NeMo, where nemo_patches is installed then.
FIRST = $(firstword $(NEMO_VERSIONS))
OTHERS = $(filter-out $(FIRST),$(NEMO_VERSIONS))
STAGES = .venv/stages
test:
	$(MAKE) -j2 $(NEMO_VERSIONS:%=.venv/nemo-%/nemo) .venv/dev/ready .venv/docs/ready
	$(MAKE) .venv/nemo-$(FIRST)/ready
	@rm -f $(STAGES)
	@code=0; \
	$(MAKE) -k -j2 stage-test-together-$(FIRST) stage-lint-with-torch stage-check-patches stage-docs || code=$$?; \
	$(MAKE) -k -j2 stage-test-alone-$(FIRST) test-others || code=$$?; \
	echo "== make test ran"; cat $(STAGES); exit $$code

# A target as a stage of `make test`: when it has ended, one line. What failed in it tests/conftest.py adds there.
stage-%:
	@began=$$(date +%s); STAGE_LOG=$(abspath $(STAGES)) $(MAKE) $*; code=$$?; took=$$(($$(date +%s) - began)); \
	printf '%3d min %02d s  %s  %s\n' $$((took / 60)) $$((took % 60)) $$(test $$code = 0 && echo "passed" || echo "FAILED") $* >> $(STAGES); \
	exit $$code

# For every day: in under three minutes, once the environment is there. Other test files than these import torch.
WITHOUT_TORCH = tests/doctor $$(grep -l mark.wheel tests/test_*.py)
check: lint
	@echo "== tests that need neither torch nor NeMo"
	.venv/dev/bin/python -m pytest -q -n 2 --dist loadfile -m "wheel and not (alone or installed)" $(WITHOUT_TORCH)

# One after the other, beside the tests that wait.
test-others:
	@code=0; for each in test-wheel $(OLDEST_AND_NEWEST:%=test-on-python-%) $(OTHERS:%=test-together-%); do \
	$(MAKE) stage-$$each || code=$$?; done; exit $$code

test-%: .venv/nemo-%/ready
	$(MAKE) test-together-$* $(if $(filter $*,$(FIRST)),test-alone-$*)

# What needs neither torch nor NeMo is run once, from the wheel. On another NeMo what `matrix` marks is run, but for what waits.
TOGETHER = not (hosts or alone or weekly) and (installed or not wheel)
OF_EACH_NEMO = $$(grep -l mark.matrix tests/test_*.py tests/*/test_*.py)
# In the order of tests/conftest.py: xdist's own puts files of few tests last, also the longest.
PYTEST = -m pytest -q --durations 15 --dist loadfile --no-loadscope-reorder
test-together-%: .venv/nemo-%/ready
	@echo "== tests on NeMo $*"
	.venv/nemo-$*/bin/python $(PYTEST) $(if $(filter $*,$(FIRST)),-n 3 -m "$(TOGETHER)",-n 0 -m "matrix and not (alone or weekly)" $(OF_EACH_NEMO))

# Only these files are imported: others import NeMo, which each of the processes would do for nothing.
WAIT = $$(grep -l mark.alone tests/test_*.py tests/*/test_*.py)
test-alone-%: .venv/nemo-%/ready
	@echo "== tests on NeMo $*, those that wait, three files at a time"
	.venv/nemo-$*/bin/python $(PYTEST) -n 3 -m "alone and not (hosts or weekly)" $(WAIT)

# Hosts made of namespaces, real NeMo on them: needs root, iproute2 and iptables, and skips by name what it may not do.
test-hosts: .venv/nemo-$(FIRST)/ready
	@echo "== hosts made of namespaces, with NeMo $(FIRST)"
	.venv/nemo-$(FIRST)/bin/python -m pytest -q --durations 15 -n 5 tests/hosts

# Built as a user would, in clean environments; tested with the sdist's own tests, beside which there is no nemo_patches
# but the installed one. (Not beside ruff: a build has a copy of all files in the checkout for a moment.)
test-wheel: build-wheel
	@echo "== the wheel, its tests where neither NeMo nor torch is"
	$(call test_the_wheel,$(PYTHON),.venv/wheel/python,-c constraints.txt,$(WITHOUT_TORCH))

# Of the wheel that test-wheel has built: what depends on Python, without changes of code by chance, which take longer than all of
# it (test-wheel has them). All Pythons and all of the wheel's tests: test-pythons.
OLDEST_AND_NEWEST = $(firstword $(PYTHONS)) $(lastword $(PYTHONS))
DEPENDS_ON_PYTHON = stored start_up settings command_line launch golden laptop stacks_collect packaging packages
test-on-python-%:
	@echo "== the wheel, what depends on Python in its tests, on Python $*"
	$(if $(call python_of,$*),$(call test_the_wheel,$(call python_of,$*),.venv/wheel/python-$*,,$(DEPENDS_ON_PYTHON:%=tests/test_%.py) tests/doctor/test_code_in_other_words.py -k "not keeps_what"),\
		@echo "   not run: no python$* is here" | tee -a $${STAGE_LOG:-/dev/null})

# python3.13 where that runs, else one of pyenv's.
python_of = $(shell for each in python$1 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$1.*/bin/python; do "$$each" -c "" 2> /dev/null && echo "$$each" && break; done)

# The same on other Pythons, and what the checkout's own start-up does. Without constraints.txt: some of its versions are
# not for all of them.
test-pythons: build-wheel
	$(MAKE) $(PYTHONS:%=test-python-%)

test-python-%:
	@echo "== the wheel, its tests on Python $*, where neither NeMo nor torch is"
	$(call test_the_wheel,$(call python_of,$*),.venv/wheel/python-$*,,$(WITHOUT_TORCH))
	.venv/wheel/python-$*/bin/python -m pytest -q -n 2 -m "not wheel" \
		tests/test_start_up.py tests/test_settings.py tests/test_one_folder.py

# NeMo $(DEMO_NEMO) on other Pythons, with all that it needs in a version for that Python: each week in CI. docs/vendors.md has the results.
test-nemo-pythons: $(PYTHONS:%=test-nemo-python-%)
TESTS_ON_PYTHONS = $(TESTS_WITH_torch) $(TESTS_WITH_lightning) as_stock trace job_folder last_batch job_stalls

test-nemo-python-%: .venv/nemo-python-%/ready
	@echo "== NeMo on Python $*, with:"
	.venv/nemo-python-$*/bin/python -VV
	.venv/nemo-python-$*/bin/python -m pip list | grep -iE "^(torch|nemo_toolkit|lightning|pytorch-lightning|wrapt|lhotse|omegaconf|hydra-core) "
	.venv/nemo-python-$*/bin/python -m pytest -q -n 2 --dist loadfile $(TESTS_ON_PYTHONS:%=tests/test_%.py)

.venv/nemo-python-%/ready: constraints.txt pyproject.toml
	@echo "== making the virtual environment .venv/nemo-python-$* with nemo_toolkit[asr]==$(DEMO_NEMO)"
	$(call python_of,$*) -m venv .venv/nemo-python-$*
	.venv/nemo-python-$*/bin/python -m pip install -q $(shell grep ^torch== constraints.txt)
	.venv/nemo-python-$*/bin/python -m pip install -q "nemo_toolkit[asr]==$(DEMO_NEMO)" -e ".[dev]"
	@touch $@

# NeMo $(DEMO_NEMO) with another torch, Lightning or wrapt than its environment's, which has what else is needed: not in CI. torch is
# the index's own build, with CUDA: about 5 GB on the disk, and it runs without a GPU. docs/vendors.md has the results.
test-torch: $(TORCHES:%=test-with-torch-%)
test-lightning: $(LIGHTNINGS:%=test-with-lightning-%)
test-wrapt: $(WRAPTS:%=test-with-wrapt-%)
TESTS_WITH_torch = stragglers private_growth exit peers stall_reports auto_apply
TESTS_WITH_lightning = trainer_callbacks stop_together launch
TESTS_WITH_wrapt = stored apply own_syncs import_hook as_stock

# NeMo asks for Lightning up to 2.4. 2.6.0 can be imported with NeMo 2.4 and before only, later ones with none; and it does not
# load NeMo's own checkpoints, which hold more than weights, unless torch is told to.
test-with-lightning-2.6.0: export PYTHONPATH = $(CURDIR)/.venv/unpacked/nemo-2.4.1:$(CURDIR)/.venv/unpacked/needs
test-with-lightning-2.6.0: export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD = 1
test-with-lightning-2.6.0: .venv/unpacked/nemo-2.4.1/ready .venv/unpacked/needs/ready
.venv/with-lightning-2.6.0/ready: BEHIND = $(MATRIX_HOST)
BEHIND = $(DEMO_NEMO)

test-with-%: .venv/with-%/ready
	@echo "== NeMo with $*"
	.venv/with-$*/bin/python -m pytest -q -n 2 --dist loadfile $(TESTS_WITH_$(firstword $(subst -, ,$*)):%=tests/test_%.py)

# The .pth puts the packages of NeMo's environment, nemo_patches among them, behind the new one's.
.venv/with-%/ready: .venv/nemo-$(DEMO_NEMO)/ready .venv/nemo-$(MATRIX_HOST)/ready
	@echo "== making the virtual environment .venv/with-$*, in front of .venv/nemo-$(BEHIND)"
	.venv/nemo-$(BEHIND)/bin/python -m venv .venv/with-$*
	.venv/nemo-$(BEHIND)/bin/python -c "import sysconfig as c; print(f'import site; site.addsitedir({c.get_path(\"purelib\")!r})')" \
		> $$(.venv/with-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/behind.pth
	.venv/with-$*/bin/python -m pip install -q $(subst -,==,$*)
	@touch $@

build-wheel: tools = .venv/dev/bin/python
build-wheel: .venv/dev/ready
	rm -rf .venv/wheel/dist .venv/wheel/sdist
	mkdir -p .venv/wheel/sdist
	$(tools) -m build -q --outdir .venv/wheel/dist
	$(tools) -m twine check --strict .venv/wheel/dist/*
	tar -xzf .venv/wheel/dist/*.tar.gz -C .venv/wheel/sdist --strip-components 1
	rm -r .venv/wheel/sdist/nemo_patches .venv/wheel/sdist/sitecustomize.py

# $1: a Python, $2: the folder for its environment, $3: options of pip, $4: files of tests. What the wheel needs stands in pyproject.toml: as
# long as that is the same, only the wheel itself is installed anew.
define test_the_wheel
	test $2/ready -nt pyproject.toml -a $2/ready -nt constraints.txt || { rm -rf $2 && $1 -m venv $2 && \
		$2/bin/python -m pip install -q $3 pytest pytest-timeout pytest-xdist hypothesis \
		"$$(ls .venv/wheel/dist/*.whl)[tools]" && touch $2/ready; }
	$2/bin/python -m pip install -q --no-deps --force-reinstall .venv/wheel/dist/*.whl
	cd .venv/wheel/sdist && $(CURDIR)/$2/bin/pytest -q -n 2 -m "wheel and not installed" $4
endef

# On a Slurm of its own, made of namespaces: Debian's packages and root; without them the tests are skipped, by name.
.PHONY: test-slurm
test-slurm: .venv/nemo-$(FIRST)/ready
	@echo "== tests on a real Slurm"
	.venv/nemo-$(FIRST)/bin/python -m pytest -q --durations 15 -n 4 --dist loadfile tests/slurm

test-matrix: $(MATRIX:%=matrix-%)
# What takes too long for `make test` is run on each release that it depends on, but test_vendored.py by `make test-vendored`.
OF_THE_MATRIX = --ignore=tests/test_vendored.py -m "matrix or weekly and not ($(if $(filter $*,$(FIRST)),hosts,one_nemo))"

# The tests compare TEST_NEMO with the NeMo they find, in this process and in the ranks.
$(filter $(NEMO_VERSIONS:%=matrix-%),$(MATRIX:%=matrix-%)): matrix-%: .venv/nemo-%/ready
	@echo "== matrix: NeMo $*"
	TEST_NEMO=$* .venv/nemo-$*/bin/python -m pytest -q $(OF_THE_MATRIX)

$(filter-out $(NEMO_VERSIONS:%=matrix-%),$(MATRIX:%=matrix-%)): matrix-%: .venv/unpacked/nemo-%/ready .venv/unpacked/needs/ready
	@echo "== matrix: NeMo $* in the environment of $(MATRIX_HOST)"
	TEST_NEMO=$* PYTHONPATH=$(CURDIR)/.venv/unpacked/nemo-$*:$(CURDIR)/.venv/unpacked/needs \
		.venv/nemo-$(MATRIX_HOST)/bin/python -m pytest -q $(OF_THE_MATRIX)

# Each command's words, as they are now; look at the difference before you commit it.
golden: .venv/nemo-$(DEMO_NEMO)/ready
	RENEW_GOLDEN=1 .venv/nemo-$(DEMO_NEMO)/bin/python -m pytest -q -k words \
		tests/test_golden.py tests/doctor/test_doctor_golden.py tests/test_status_command.py tests/test_diff_command.py

# $1: the environment, $2: options of mypy.
define lint
	@echo "== ruff and mypy in $1"
	$1/bin/ruff check .
	$1/bin/ruff format --check .
	$1/bin/mypy $2
endef

# Without torch, whose types are then Any: what mypy says of that is left to the environments that have it.
TORCH_IS_ANY = --allow-subclassing-any --allow-untyped-decorators --no-warn-return-any --no-warn-unused-ignores \
	--disable-error-code=redundant-cast --cache-dir=.venv/dev/mypy
lint: .venv/dev/ready
	$(call lint,.venv/dev,$(TORCH_IS_ANY))

lint-with-torch: .venv/nemo-$(FIRST)/ready
	$(call lint,.venv/nemo-$(FIRST),)

benchmark: .venv/nemo-$(DEMO_NEMO)/ready
	.venv/nemo-$(DEMO_NEMO)/bin/python benchmarks/length_sync.py

benchmark-start-up: .venv/nemo-$(DEMO_NEMO)/ready .venv/start-up/ready
	.venv/nemo-$(DEMO_NEMO)/bin/python benchmarks/start_up.py --tools .venv/start-up --torch .venv/nemo-$(DEMO_NEMO)

# Other tools with a start-up hook, for the comparison only.
.venv/start-up/ready:
	@echo "== making the virtual environment .venv/start-up with ddtrace, opentelemetry-distro and wrapt"
	$(PYTHON) -m venv .venv/start-up
	.venv/start-up/bin/python -m pip install -q -c constraints.txt ddtrace opentelemetry-distro wrapt
	@touch $@

# torch first, alone: a later requirement then finds it there and downloads no other build.
define install_nemo
	@echo "== making the virtual environment .venv/nemo-$1 with torch and nemo_toolkit[asr]==$1 (some minutes, once)"
	$(PYTHON) -m venv .venv/nemo-$1
	.venv/nemo-$1/bin/python -m pip install -q -c constraints.txt torch
	.venv/nemo-$1/bin/python -m pip install -q -c constraints.txt "nemo_toolkit[asr]==$1"
	.venv/nemo-$1/bin/python -c "import nemo.collections.asr"  # compiled once, not by each process that comes first
endef

# What needs neither torch nor NeMo: the commands, their tests, lint, and a wheel's build.
.venv/dev/ready: constraints.txt pyproject.toml
	@echo "== making the virtual environment .venv/dev, without torch and NeMo"
	$(PYTHON) -m venv .venv/dev
	.venv/dev/bin/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

# Without our own package, which two environments cannot install at once: it is built in the checkout.
.venv/nemo-%/nemo: constraints.txt pyproject.toml
	$(call install_nemo,$*)
	@touch $@

.venv/nemo-%/ready: .venv/nemo-%/nemo
	.venv/nemo-$*/bin/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

print_diff = .venv/nemo-$(DEMO_NEMO)/bin/nemo-patches diff --nemo .venv/unpacked/nemo-$1

patches: $(PATCHES:%=patch-%)

$(PATCHES:%=patch-%): patch-%: .venv/unpacked/nemo-%/ready
	$(call print_diff,$*) > patches/nemo-$(call series,$*).diff

# Each diff against every release of its series, not only the one it was made from; downloads what is not unpacked.
patches-table: .venv/nemo-$(DEMO_NEMO)/ready
	@.venv/nemo-$(DEMO_NEMO)/bin/python tests/every_release.py

# What docs/vendors.md says of patches/upstream/, by series.
UPSTREAM_2.2 = encoders/0001*.patch conv-asr/*.patch squeezeformer/*.patch checkpoint/*.patch
UPSTREAM_2.3 = $(UPSTREAM_2.2)
UPSTREAM_2.4 = encoders/000[13]*.patch conv-asr/*.patch squeezeformer/*.patch checkpoint/*.patch
UPSTREAM_2.5 = $(UPSTREAM_2.4)
UPSTREAM_2.6 = $(UPSTREAM_2.4)
UPSTREAM_2.7 = $(UPSTREAM_2.4)
UPSTREAM_3.0 = encoders/000[134]*.patch conv-asr/*.patch checkpoint/*.patch
try_upstream = cd .venv/unpacked/nemo-$1 && GIT_CEILING_DIRECTORIES=$$(cd .. && pwd -P) git apply --check --include='nemo/*' \
	$(UPSTREAM_$(call series,$1):%=$(CURDIR)/patches/upstream/%)

# Whether each committed diff is what `make patches` would make of the released wheel, and each tool takes it in and out.
check-patches: $(PATCHES:%=.venv/unpacked/nemo-%/ready)
	@echo "== patches/ against the released wheels"
	@.venv/nemo-$(DEMO_NEMO)/bin/python tests/every_release.py $(PATCHES)
	@$(foreach release,$(filter-out 2.1.0,$(MATRIX)),($(call try_upstream,$(release))) &&) true

# Ranks of a NeMo that has its diff, without nemo_patches; `make test` runs eleven of the scenarios on its first NeMo alone.
test-vendored: $(MATRIX:%=vendored-%)

$(MATRIX:%=vendored-%): vendored-%: .venv/unpacked/nemo-%/ready .venv/unpacked/needs/ready
	@echo "== vendored: NeMo $*"
	TEST_VENDORED=$(CURDIR)/.venv/unpacked/nemo-$* PYTHONPATH=$(CURDIR)/.venv/unpacked/needs \
		.venv/nemo-$(if $(filter $*,$(NEMO_VERSIONS)),$*,$(MATRIX_HOST))/bin/python -m pytest -q tests/test_vendored.py

# NeMo's own files only. --no-deps: what it asks for, torch above all, is the environment's.
.venv/unpacked/nemo-%/ready: | .venv/nemo-$(MATRIX_HOST)/nemo
	@echo "== unpacking nemo_toolkit==$* to .venv/unpacked/nemo-$*"
	$(UNPACK) $(@D) nemo_toolkit==$*
	@touch $@

# What some of them import and the environment of $(MATRIX_HOST) does not have: first the ASR of 2.5, then the NLP
# of 2.1 to 2.4.
.venv/unpacked/needs/ready: | .venv/nemo-$(MATRIX_HOST)/ready
	@echo "== unpacking what the older releases import to .venv/unpacked/needs"
	$(UNPACK) $(@D) texterrors==1.1.9 loguru==0.7.3 termcolor==3.3.0 \
		megatron_core==0.16.1 h5py==3.16.0 ijson==3.6.0 jieba==0.42.1 nltk==3.10.4 opencc==1.4.2 pangu==4.0.6.1 \
		rouge_score==0.1.2 six==1.17.0
	@touch $@

# Before anything is built for a release.
.PHONY: check-tag
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' nemo_patches/__init__.py)
check-tag:
	@test "$(TAG)" = "v$(VERSION)" || { echo "check-tag: the tag is $(TAG), and __version__ asks for v$(VERSION)" >&2; exit 1; }

.PHONY: reference pictures docs screenshots
reference: .venv/dev/ready
	.venv/dev/bin/python docs/programs/reference.py

# Of the package only the collector is in it, which needs the standard library alone; py-spy is looked for where it runs.
.PHONY: stacks.pyz
PYZ = .venv/stacks
COLLECTOR = nemo_patches/tools/diagnose/collect
stacks.pyz:
	rm -rf $(PYZ)
	mkdir -p $(PYZ)/$(COLLECTOR)
	cp $(COLLECTOR)/*.py $(PYZ)/$(COLLECTOR)
	touch $(PYZ)/nemo_patches/__init__.py $(PYZ)/nemo_patches/tools/__init__.py $(PYZ)/nemo_patches/tools/diagnose/__init__.py
	$(PYTHON) -m zipapp $(PYZ) --compress --python "/usr/bin/env python3" --main $(subst /,.,$(COLLECTOR)).host_jobs:main --output $(PYZ).pyz

# The page of a stuck job, as an installed Chromium or Chrome shows it. diagnose's exit code is 1: it has found the rank.
CHROMIUM ?= $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
pictures: .venv/nemo-$(DEMO_NEMO)/ready
	@test -n "$(CHROMIUM)" || { echo "pictures: no Chromium or Chrome on the PATH; CHROMIUM=/path/to/it" >&2; exit 1; }
	rm -rf .venv/pictures
	mkdir -p .venv/pictures
	.venv/nemo-$(DEMO_NEMO)/bin/python docs/programs/stalled_job.py .venv/pictures/traces
	cd .venv/pictures && ../nemo-$(DEMO_NEMO)/bin/nemo-patches diagnose traces --html stall.html; test $$? = 1
	timeout 120 "$(CHROMIUM)" --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
		--user-data-dir=.venv/pictures/profile --force-device-scale-factor=1.5 --window-size=1060,675 \
		--screenshot=docs/pictures/stall.png file://$(CURDIR)/.venv/pictures/stall.html

# Not with --quiet: what it does not print does not count as an error.
docs: .venv/docs/ready
	@echo "== the documents' site"
	.venv/docs/bin/mkdocs build --strict

.venv/docs/ready: constraints.txt
	@echo "== making the virtual environment .venv/docs with mkdocs-material"
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install -q -c constraints.txt mkdocs-material
	@touch $@

# With the Chromium or Chrome that is installed: playwright's own is not downloaded. Not in `make test`.
screenshots: docs .venv/docs/playwright
	.venv/docs/bin/python docs/programs/screenshots.py .venv/site .venv/screenshots

.venv/docs/playwright: .venv/docs/ready
	.venv/docs/bin/python -m pip install -q -c constraints.txt playwright
	@touch $@

clean:
	rm -rf .venv
