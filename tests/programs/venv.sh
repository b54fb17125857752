# python: a virtual environment with packages from pip, and pytest that runs in it.
export PYTHONDONTWRITEBYTECODE= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

work() {
    /usr/bin/python3 -m venv venv
    venv/bin/pip install -q pytest > said 2>&1 || {
        cat said
        echo "pip install: it needs PyPI"
        return 1
    }
    mkdir package tests
    printf 'def twice(n):\n    return 2 * n\n' > package/__init__.py
    cat > tests/test_package.py <<-END
	import os, sys
	from package import twice
	def test_twice(): assert twice(21) == 42
	def test_where(): assert sys.prefix == os.path.join(os.getcwd(), "venv")
	def test_temporary(tmp_path):
	    (tmp_path / "f").write_text("x")
	    assert (tmp_path / "f").read_text() == "x"
	END
    printf '[build-system]\nrequires = []\n' > pyproject.toml
    printf '[tool.pytest.ini_options]\npythonpath = "."\n' >> pyproject.toml
    venv/bin/pip freeze > frozen
    grep -q '^pytest==' frozen
}

holds() {
    test "$(readlink -f venv/bin/python)" = "$(readlink -f /usr/bin/python3)"
    venv/bin/pip freeze | diff frozen -
    venv/bin/pip check > said
    mkdir -p temporary
    venv/bin/pytest -q --basetemp=temporary/t > said 2>&1 || { cat said; return 1; }
    grep -q '3 passed' said
    # The paths in `activate` are right.
    test "$(. venv/bin/activate && command -v pytest)" = "$PWD/venv/bin/pytest"
}

more() {
    venv/bin/pip uninstall -q -y pytest
    test ! -e venv/bin/pytest
    /usr/bin/python3 -m venv --clear --without-pip venv
    rm -rf tests
}
