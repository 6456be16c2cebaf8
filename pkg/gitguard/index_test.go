package gitguard

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const blob = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"

func TestP12AnIndexThatLeadsOutOfTheWorktreeIsRefusedByPath(t *testing.T) {
	for _, path := range []string{
		"/etc/passwd", "../x", "a/../../x", "..", ".", "./a", "a/.", "a//b", "a/", "", ".git/config", "sub/.git", ".GIT/config", ".Git/x", "git~1/x", "GIT~1",
		".git /x", ".git./x", ".git. ./x", ".git::$INDEX_ALLOCATION/x", ".g\u200cit/x", "\ufeff.git/x", ".gi\u206ft", `.git\config`, `a\.git\b`, strings.Repeat("a/", 3000) + "a",
	} {
		_, err := CheckIndex([]byte("100644 " + blob + " 0\tfine\x00100644 " + blob + " 0\t" + path + "\x00"))
		require.ErrorIs(t, err, ErrIndex, "%q", path)
		if len(path) < 100 {
			require.ErrorContains(t, err, strconv.Quote(path))
		}
	}
}

func TestWhatAWorktreeHasIsAccepted(t *testing.T) {
	for _, path := range []string{"a", "a/b", ".gitignore", ".gitattributes", ".github/x", "a.git/x", "..a", "a..", "...", "a b\n\t\"", "\xff\xfe", `a\b`, "git~2", ".git2", "üx"} {
		ids, err := CheckIndex([]byte("100644 " + blob + " 0\t" + path + "\x00"))
		require.NoError(t, err, "%q", path)
		require.Equal(t, []string{blob}, ids)
	}
	ids, err := CheckIndex(nil)
	require.NoError(t, err)
	require.Empty(t, ids)
}

func TestP12WhatIsNoFileInAnIndexIsRefused(t *testing.T) {
	for _, entry := range []string{
		"160000 " + blob + " 0\tsub", "040000 " + blob + " 0\tdir", "100644 " + blob + " 4\ta", "100644 " + blob[:39] + " 0\ta", "100644 " + strings.Repeat("0", 40) + " 0\ta",
		"100644 " + strings.ToUpper(blob) + " 0\ta", "100644 " + blob + " 0 a", "100644 " + blob + "\ta", "", "x",
	} {
		_, err := CheckIndex([]byte(entry + "\x00"))
		require.ErrorIs(t, err, ErrIndex, "%q", entry)
	}
	_, err := CheckIndex([]byte("100644 " + blob + " 0\ta"))
	require.ErrorIs(t, err, ErrIndex, "cut off")
	_, err = CheckIndex([]byte("160000 " + blob + " 0\tsub/x\x00"))
	require.ErrorContains(t, err, "sub/x")
	require.ErrorContains(t, err, "submodule")
}

func TestARealIndexIsRead(t *testing.T) {
	dir := testRepo(t)
	require.NoError(t, os.Symlink("a", filepath.Join(dir, "link")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tool"), []byte("#!/bin/sh\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "intended"), nil, 0o644))
	git(t, dir, "add", "link", "tool")
	git(t, dir, "add", "-N", "intended")
	ids, err := CheckIndex([]byte(git(t, dir, "ls-files", "-z", "--stage")))
	require.NoError(t, err)
	require.Len(t, ids, 5)
	for _, id := range ids {
		if id != blob { // what add -N records is the empty blob, which it doesn't write
			git(t, dir, "cat-file", "-e", id)
		}
	}
}

func TestP12ANestedRepositoryInTheIndexIsRefused(t *testing.T) {
	dir := testRepo(t)
	git(t, dir, "init", "-q", "nested")
	git(t, filepath.Join(dir, "nested"), "commit", "-q", "--allow-empty", "-m", "x")
	git(t, dir, "add", "nested")
	list := git(t, dir, "ls-files", "-z", "--stage")
	require.Contains(t, list, "160000 ", "control: Git records it")
	_, err := CheckIndex([]byte(list))
	require.ErrorIs(t, err, ErrIndex)
	require.ErrorContains(t, err, "nested")
}

func TestAPatternCoversWholeRefs(t *testing.T) {
	for pattern, refs := range map[string]map[string]bool{
		"refs/heads/main":     {"refs/heads/main": true, "refs/heads/main2": false, "refs/heads/main/x": false},
		"refs/heads/agent/*":  {"refs/heads/agent/a": true, "refs/heads/agent/a/b": false, "refs/heads/agent": false, "refs/heads/agentx/a": false},
		"refs/heads/agent/**": {"refs/heads/agent/a": true, "refs/heads/agent/a/b": true},
		"refs/tags/v*.*":      {"refs/tags/v1.0": true, "refs/tags/v1": false, "refs/tags/v1/x.0": false},
		"refs/**/x":           {"refs/heads/x": true, "refs/heads/a/b/x": true, "refs/x": false},
		"**":                  {"refs/heads/x": true},
		"refs/heads/*/x":      {"refs/heads/a/x": true, "refs/heads/a/b/x": false, "refs/heads/ab/x": true},
		"":                    {"refs/heads/x": false},
	} {
		for ref, want := range refs {
			require.Equal(t, want, Matches(pattern, ref), "%s %s", pattern, ref)
		}
	}
}
