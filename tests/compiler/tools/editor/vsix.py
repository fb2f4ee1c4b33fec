"""`python -m tests.compiler.tools.editor.vsix FILE`: checks that a package of the extension has what the editor loads,
and nothing else."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

NEEDED = (
    "extension/package.json",
    "extension/extension.js",
    "extension/program.js",
    "extension/language-configuration.json",
    "extension/syntaxes/dsc.tmLanguage.json",
    "extension/node_modules/vscode-languageclient/package.json",
    "extension/node_modules/vscode-languageclient/lib/node/main.js",
    "extension/node_modules/vscode-languageserver-protocol/package.json",
)
UNWANTED = ("/test/scopes.json", "/.npmrc", "/vscode-textmate/", "/vscode-oniguruma/", "/@vscode/vsce/")


def mistakes(path: Path) -> list[str]:
    """Files missing in a package, and files that should not be in it."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        errors = [f"{name} is missing" for name in NEEDED if name not in names]
        errors += [f"{name} is too much" for name in names if any(part in f"/{name}" for part in UNWANTED)]
        if errors:
            return errors
        manifest = json.loads(archive.read("extension/package.json"))
        main = "extension/" + manifest["main"].removeprefix("./")
        client = json.loads(archive.read("extension/node_modules/vscode-languageclient/package.json"))
    wanted = manifest["dependencies"]["vscode-languageclient"]
    errors += [] if main in names else [f"{main} is missing"]
    return errors + ([] if client["version"] == wanted else [f"vscode-languageclient is {client['version']}"])


if __name__ == "__main__":
    told = mistakes(Path(sys.argv[1]))
    print("\n".join(told) or f"{sys.argv[1]}: right")
    sys.exit(bool(told))
