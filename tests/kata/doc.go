// Package kata runs containers under Kata's name in a containerd of the tests' own, with a shim that keeps Kata's contracts and
// breaks them on request (folder shim), and checks what package pkg/kata makes of it. No VM is run here: the processes in
// the place of a VMM and a file server are ordinary ones, and what runs "in the guest" is a container of runc's.
package kata
