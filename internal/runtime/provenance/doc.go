// Package provenance says what the programs are that go into a sandbox: their SHA-256, taken from the very file that is
// mounted and remembered as long as nothing about the file has changed.
//
// Every runtime uses it, and the agent for what it was started with; so a program that was swapped under the running agent
// is noticed before a command runs beside it. It keeps that part of promises P2 and P9.
package provenance
