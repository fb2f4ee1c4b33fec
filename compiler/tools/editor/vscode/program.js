// Which program serves: pure, so that it can be tested without an editor.
"use strict";

const path = require("node:path");

/**
 * The `dsc` to start: the setting, else that of a folder's virtual environment, else the one on the PATH.
 *
 * A workspace that is not trusted must not choose what runs: its folders are not looked at. (Its settings do not reach
 * here either: `dsc.path` is among the restricted ones.)
 */
function programOf(setting, folders, trusted, platform, exists) {
  if (setting) return setting;
  const [join, inside] =
    platform === "win32" ? [path.win32.join, ["Scripts", "dsc.exe"]] : [path.posix.join, ["bin", "dsc"]];
  const candidates = trusted ? folders.map((folder) => join(folder, ".venv", ...inside)) : [];
  return candidates.find(exists) ?? "dsc";
}

module.exports = { programOf };
