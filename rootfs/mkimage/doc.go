// Command mkimage makes the project's two images of a root file system and of the project's own programs: the sandbox's, and
// the agent's own. scripts/image.sh runs it; nobody imports it.
//
// The same input gives the same bytes, whoever runs it and when: files are in the order of their names, their times are at
// most SOURCE_DATE_EPOCH, and nothing of the machine goes into an archive. What decides is the version of Go, which compresses
// the layers and compiles the programs, and the C library that the agent is linked with.
package main
