package gitguard

import (
	"strings"
	"sync"
)

// pattern is a set of configuration keys, spelled as in git-config(1): "section.variable", "section.*.variable" for any
// subsection, or "section.**" for everything in a section, with or without a subsection.
type pattern string

func (p pattern) matches(e Entry) bool {
	section, _, has, variable := e.split()
	want := strings.ToLower(string(p))
	if s, all := strings.CutSuffix(want, ".**"); all {
		return section == s
	}
	if s, v, sub := strings.Cut(want, ".*."); sub {
		return has && section == s && variable == v
	}
	s, v, _ := strings.Cut(want, ".")
	return !has && section == s && variable == v
}

// rule is what the guard says of some keys.
type rule struct {
	keys []pattern
	kind Kind
	why  string
	// remedy is what to do besides taking the key out; empty: nothing else.
	remedy string
	// unless says of which values the rule does not speak; unlessSays says it in words. nil: of none.
	unless     func(Entry) bool
	unlessSays string
}

func (r rule) matches(e Entry) bool {
	for _, p := range r.keys {
		if p.matches(e) {
			return r.unless == nil || !r.unless(e)
		}
	}
	return false
}

// Conditions on values, with their words.
const (
	saysOff     = "false"
	saysBool    = "true or false"
	saysNoShell = "no program (no leading !)"
	saysNoProxy = "no name of a helper program (helper::address)"
	saysListed  = "postBuffer, version, lowSpeedLimit or lowSpeedTime"
)

// helperURL is an address that has Git run git-remote-HELPER (gitremote-helpers(7)).
func helperURL(e Entry) bool {
	scheme, _, found := strings.Cut(e.Value, "::")
	return found && scheme != "" && strings.Trim(strings.ToLower(scheme), "abcdefghijklmnopqrstuvwxyz0123456789+-._") == ""
}

func oneOf(values ...string) func(Entry) bool {
	return func(e Entry) bool {
		for _, v := range values {
			if e.HasValue && strings.EqualFold(e.Value, v) {
				return true
			}
		}
		return false
	}
}

const (
	whyPartial    = "the clone is partial: Git would fetch missing objects over a network that no sandbox has"
	remedyPartial = "fetch everything first (git fetch --refetch --no-filter)"
)

// rules are looked at in this order; the first that speaks of an entry counts. An entry whose value a rule excuses, and
// of which no later rule speaks, is as good as one on the list of harmless keys.
var rules = []rule{
	{kind: Include, keys: []pattern{"include.**", "includeIf.**"},
		why:    "it reads further configuration, which can be replaced at any time and was not checked",
		remedy: "copy what it includes into this file instead"},
	{kind: Filter, keys: []pattern{"filter.**"},
		why:    "it runs a program for each file that is checked out or added",
		remedy: "sandboxes have no checkout filters (Git LFS is one): use a clone without them"},

	{kind: Extension, keys: []pattern{"extensions.worktreeConfig"}, unless: Entry.off, unlessSays: saysOff,
		why:    "it makes Git read config.worktree, a file that each worktree has for itself",
		remedy: "move what is in config.worktree into this file (git sparse-checkout disable, if that made it)"},
	{kind: Extension, keys: []pattern{"extensions.partialClone"}, why: whyPartial, remedy: remedyPartial},
	{kind: Clone, keys: []pattern{"remote.*.promisor"}, unless: Entry.off, unlessSays: saysOff, why: whyPartial, remedy: remedyPartial},
	{kind: Clone, keys: []pattern{"remote.*.partialCloneFilter"}, why: whyPartial, remedy: remedyPartial},
	{kind: Clone, keys: []pattern{"core.sparseCheckout", "core.sparseCheckoutCone", "index.sparse"}, unless: Entry.off, unlessSays: saysOff,
		why:    "the checkout is sparse, by a file in the Git folder that each worktree has for itself",
		remedy: "check everything out (git sparse-checkout disable)"},
	{kind: Unknown, keys: []pattern{"extensions.preciousObjects"}, unless: Entry.off, unlessSays: saysOff,
		why: "a private clone holds copies only, which may be tidied up"},
	{kind: Extension, keys: []pattern{"extensions.objectFormat"}, unless: oneOf("sha1", "sha256"), unlessSays: "sha1 or sha256",
		why: "it is an object format that the guard does not know"},
	{kind: Extension, keys: []pattern{"extensions.refStorage"}, unless: oneOf("files", "reftable"), unlessSays: "files or reftable",
		why: "it is a format of refs that the guard does not know"},
	{kind: Extension, keys: []pattern{"extensions.relativeWorktrees", "extensions.noop", "extensions.noop-v1"}, unless: Entry.isBool, unlessSays: saysBool,
		why: "it has a value that the guard does not know"},
	{kind: Extension, keys: []pattern{"core.repositoryFormatVersion"}, unless: oneOf("0", "1"), unlessSays: "0 or 1",
		why: "it is a version of the repository's format that the guard does not know"},

	{kind: Program, keys: []pattern{"core.fsmonitor"}, unless: Entry.off, unlessSays: saysOff,
		why: "it runs a program whenever Git looks at the worktree"},
	{kind: Program, keys: []pattern{"core.hooksPath", "hook.**"},
		why:    "it runs programs when Git commits, checks out, merges or fetches",
		remedy: "hooks do not run in sandboxes unless the operator lets them"},
	{kind: Program, keys: []pattern{"core.pager", "core.editor", "sequence.editor", "interactive.diffFilter", "core.askPass"},
		why: "it runs a program to show, edit or ask something"},
	{kind: Program, keys: []pattern{"pager.**"}, unless: Entry.isBool, unlessSays: saysBool,
		why: "it runs a program to show something"},
	{kind: Program, keys: []pattern{"core.sshCommand", "core.gitProxy", "ssh.**"},
		why: "it runs a program to reach another repository"},
	{kind: Program, keys: []pattern{"core.alternateRefsCommand", "gc.recentObjectsHook", "uploadpack.packObjectsHook"},
		why: "it runs a program when Git packs, fetches or tidies up"},
	{kind: Program, keys: []pattern{"diff.external", "diff.*.command", "diff.*.textconv", "merge.*.driver"},
		why: "it runs a program to compare or merge files"},
	{kind: Program, keys: []pattern{"pull.twohead", "pull.octopus"},
		why: "it names a merge strategy, for which Git runs git-merge-NAME"},
	{kind: Program, keys: []pattern{"gpg.program", "gpg.*.program", "gpg.*.defaultKeyCommand"},
		why: "it runs a program to sign or verify"},
	{kind: Program, keys: []pattern{"alias.**"},
		why: "it gives Git commands of its own, which can run programs"},
	{kind: Program, keys: []pattern{"trailer.*.command", "trailer.*.cmd"},
		why: "it runs a program for each commit message"},
	{kind: Program, keys: []pattern{"credential.**"},
		why:    "it runs a program that knows passwords, or is about one",
		remedy: "sandboxes have no credentials"},
	{kind: Program, keys: []pattern{"submodule.*.update"}, unless: func(e Entry) bool { return !strings.HasPrefix(strings.TrimSpace(e.Value), "!") }, unlessSays: saysNoShell,
		why: "it runs a program to update a submodule"},
	{kind: Program, keys: []pattern{"difftool.**", "mergetool.**", "man.**", "browser.**", "web.browser", "help.browser", "guitool.**", "instaweb.**", "tar.**", "imap.**", "sendemail.**"},
		why: "it can run a program for one of Git's helper commands"},
	{kind: Program, keys: []pattern{"branch.*.mergeOptions"},
		why: "it adds options to git merge, which can name a program or a file"},

	{kind: PathMoving, keys: []pattern{"core.worktree"},
		why: "it moves the worktree of the clone"},
	{kind: PathMoving, keys: []pattern{"submodule.*.gitdir"},
		why: "it moves the Git folder of a submodule"},
	{kind: PathMoving, keys: []pattern{"core.attributesFile", "core.excludesFile", "commit.template", "mailmap.file", "blame.ignoreRevsFile", "diff.orderFile",
		"fsck.skipList", "fetch.*.skipList", "receive.*.skipList", "gpg.*.allowedSignersFile", "gpg.*.revocationFile", "format.signatureFile"},
		why: "it has Git read a file that can lie anywhere, and does not exist in a sandbox"},
	{kind: PathMoving, keys: []pattern{"init.templateDir", "format.outputDirectory"},
		why: "it has Git read or write in a folder that can lie anywhere"},
	{kind: PathMoving, keys: []pattern{"core.preferSymlinkRefs"}, unless: Entry.off, unlessSays: saysOff,
		why: "it has Git write refs as symbolic links, which trusted Git does not follow"},

	{kind: Remote, keys: []pattern{"remote.*.url", "remote.*.pushUrl", "branch.*.remote", "branch.*.pushRemote", "remote.pushDefault"},
		unless: func(e Entry) bool { return !helperURL(e) }, unlessSays: saysNoProxy,
		why: "it runs git-remote-HELPER to reach another repository"},
	{kind: Remote, keys: []pattern{"remote.*.uploadpack", "remote.*.receivepack", "remote.*.vcs", "remote.*.proxy", "remote.*.proxyAuthMethod"},
		why: "it runs a program, or goes through another host, to reach another repository"},
	{kind: Remote, keys: []pattern{"url.*.insteadOf", "url.*.pushInsteadOf"},
		why: "it sends Git to another address than the one that is named"},
	{kind: Remote, keys: []pattern{"protocol.allow", "protocol.*.allow"},
		why: "it allows or forbids ways to reach other repositories"},
	{kind: Remote, keys: []pattern{"fetch.bundleURI", "fetch.bundleCreationToken", "bundle.**"},
		why: "it has Git download from another address"},
	{kind: Remote, keys: []pattern{"http.**", "https.**"}, unless: harmless, unlessSays: saysListed,
		why: "it names certificates, keys, cookies, headers or proxies, which can be secrets and lie anywhere"},

	{kind: Unknown, keys: []pattern{"commit.gpgSign", "tag.gpgSign", "tag.forceSignAnnotated", "push.gpgSign", "user.signingKey", "log.showSignature", "gpg.format"}, unless: Entry.off, unlessSays: saysOff,
		why: "sandboxes have no key to sign with: commits made in one are not signed"},
	{kind: Unknown, keys: []pattern{"core.sharedRepository"}, unless: Entry.off, unlessSays: saysOff,
		why: "it sets the set-group-id bit on folders, which no command may set"},
	{kind: Unknown, keys: []pattern{"core.splitIndex", "feature.**", "index.skipHash"}, unless: Entry.off, unlessSays: saysOff,
		why: "it changes how the index is stored, and the index is carried between the sandbox and the clone as one whole file"},
	{kind: Unknown, keys: []pattern{"submodule.**", "status.submoduleSummary", "diff.submodule", "fetch.recurseSubmodules", "push.recurseSubmodules"},
		why: "it is about submodules, which are not set up in a sandbox"},
	{kind: Unknown, keys: []pattern{"lfs.**"},
		why: "it is about Git LFS, which is not set up in a sandbox"},
}

const notListed = "it is not on the list of keys that are known to be harmless"

// harmlessText is what a sanitised configuration keeps: section (with ".*" for those that have subsections) and the
// variables in it.
const harmlessText = `
core: abbrev alternateRefsPrefixes autocrlf bare bigFileThreshold checkRoundtripEncoding checkStat commentChar commentString commitGraph
core: compression createObject deltaBaseCacheLimit eol fileMode fscache fsmonitor fsync fsyncMethod fsyncObjectFiles hideDotFiles ignoreCase ignoreStat
core: logAllRefUpdates longPaths looseCompression maxTreeDepth multiPackIndex notesRef packedGitLimit packedGitWindowSize precomposeUnicode
core: preloadIndex quotePath repositoryFormatVersion safecrlf sparseCheckout sparseCheckoutCone symlinks trustctime untrackedCache
core: useReplaceRefs warnAmbiguousRefs whitespace
extensions: objectFormat relativeWorktrees
user: email name useConfigOnly
author: email name
committer: email name
branch: autoSetupMerge autoSetupRebase sort
branch.*: description merge pushRemote rebase remote
remote: pushDefault
remote.*: fetch followRemoteHEAD mirror prune pruneTags push pushUrl skipDefaultUpdate skipFetchAll tagOpt url
remotes: *
push: autoSetupRemote default followTags negotiate pushOption useBitmaps useForceIfIncludes
pull: ff rebase
fetch: all fsckObjects negotiationAlgorithm output parallel prune pruneTags showForcedUpdates unpackLimit writeCommitGraph
transfer: advertiseSID bundleURI fsckObjects hideRefs unpackLimit
receive: advertiseAtomic advertisePushOptions autogc denyCurrentBranch denyDeleteCurrent denyDeletes denyNonFastForwards fsckObjects hideRefs keepAlive
receive: maxInputSize unpackLimit updateServerInfo
uploadpack: allowAnySHA1InWant allowFilter allowReachableSHA1InWant allowRefInWant allowTipSHA1InWant hideRefs keepAlive
protocol: version
http: lowSpeedLimit lowSpeedTime postBuffer version
merge: autoStash branchdesc conflictStyle defaultToUpstream directoryRenames ff log renameLimit renames renormalize stat suppressDest verbosity
rebase: abbreviateCommands autoSquash autoStash backend forkPoint instructionFormat missingCommitsCheck rebaseMerges rescheduleFailedExec stat updateRefs
rerere: autoUpdate enabled
commit: cleanup status verbose
checkout: defaultRemote guess thresholdForParallelism workers
clean: requireForce
diff: algorithm autoRefreshIndex colorMoved colorMovedWS context dirstat ignoreSubmodules indentHeuristic interHunkContext mnemonicPrefix noPrefix
diff: relative renameLimit renames statGraphWidth statNameWidth suppressBlankEmpty wsErrorHighlight
diff.*: algorithm binary
log: abbrevCommit date decorate diffMerges excludeDecoration follow graphColors initialDecorationSet mailmap showRoot
status: aheadBehind branch displayCommentPrefix relativePaths renameLimit renames short showStash showUntrackedFiles
stash: showIncludeUntracked showPatch showStat
color: *
color.*: *
column: *
pager: *
format: attach coverLetter from forceInBodyFrom mboxrd noPrefix notes numbered pretty signature signOff subjectPrefix suffix thread useAutoBase
pretty: *
i18n: commitEncoding logOutputEncoding
gui: encoding
advice: *
apply: ignoreWhitespace whitespace
blame: blankBoundary coloring date markIgnoredLines markUnblamableLines showEmail showRoot
grep: column extendedRegexp fullName lineNumber patternType threads
index: recordEndOfIndexEntries recordOffsetTable sparse threads version
pack: allowPackReuse compression deltaCacheLimit deltaCacheSize depth indexVersion threads useBitmaps useSparse window windowMemory writeReverseIndex
repack: updateServerInfo useDeltaBaseOffset useDeltaIslands
gc: aggressiveDepth aggressiveWindow auto autoDetach autoPackLimit bigPackThreshold cruftPacks logExpiry packRefs pruneExpire reflogExpire
gc: reflogExpireUnreachable rerereResolved rerereUnresolved worktreePruneExpire writeCommitGraph
maintenance: auto autoDetach strategy
notes: displayRef mergeStrategy rewriteMode rewriteRef
tag: sort
init: defaultBranch defaultObjectFormat defaultRefFormat
versionsort: suffix
worktree: guessRemote useRelativePaths
mailmap: blob
trailer: ifexists ifmissing separators where
`

var harmlessKeys = sync.OnceValue(func() map[string]map[string]bool { return parseHarmless(harmlessText) })

// notCopied are no findings in themselves and yet not kept: a private clone decides about them itself.
var notCopied = []pattern{"extensions.refStorage", "extensions.worktreeConfig", "extensions.preciousObjects", "extensions.noop", "extensions.noop-v1"}

// parseHarmless makes "section[.*]" → lower-case variables of the text; "*" stands for all of them.
func parseHarmless(text string) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
		section, variables, _ := strings.Cut(line, ":")
		section = strings.ToLower(section)
		if out[section] == nil {
			out[section] = map[string]bool{}
		}
		for _, v := range strings.Fields(variables) {
			out[section][strings.ToLower(v)] = true
		}
	}
	return out
}

// harmless says that a key is on the list of those that a sanitised configuration keeps.
func harmless(e Entry) bool {
	section, _, has, variable := e.split()
	if has {
		section += ".*"
	}
	variables := harmlessKeys()[section]
	return variables["*"] || variables[variable]
}
