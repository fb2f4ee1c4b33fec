// Chooses the program of the language server: pure, so that it can be tested without an editor.
"use strict";

const path = require("node:path");

/**
 * The `dsc` to start: the setting, else the one in a folder's virtual environment, else the one on the PATH.
 *
 * An untrusted workspace must not choose what runs, so its folders are ignored. (Its settings are ignored too:
 * `dsc.path` is a restricted setting.)
 */
function programOf(setting, folders, trusted, platform, exists) {
  if (setting) return setting;
  const [join, inside] =
    platform === "win32" ? [path.win32.join, ["Scripts", "dsc.exe"]] : [path.posix.join, ["bin", "dsc"]];
  const candidates = trusted ? folders.map((folder) => join(folder, ".venv", ...inside)) : [];
  return candidates.find(exists) ?? "dsc";
}

module.exports = { programOf };
