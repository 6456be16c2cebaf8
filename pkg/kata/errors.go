package kata

import "errors"

// Errors that callers tell apart with errors.Is.
var (
	// ErrNotInstalled: no shim, or no configuration, at any place that was looked at.
	ErrNotInstalled = errors.New("kata is not installed")
	// ErrUntrusted: a file that would run, or be believed, as root can be changed by others.
	ErrUntrusted = errors.New("others than root can change it")
	// ErrVersion: what the shim says of itself can't be read.
	ErrVersion = errors.New("version of the kata shim can't be told")
	// ErrConfig: the configuration can't be read, or says what can't be judged.
	ErrConfig = errors.New("kata's configuration can't be judged")
	// ErrRefused: the installation was understood and may not be used.
	ErrRefused = errors.New("kata may not be used")
	// ErrID: not the id of a sandbox.
	ErrID = errors.New("no sandbox id")
	// ErrShim: the shim's management socket is missing, is not the shim's, or gave an answer outside its contract.
	ErrShim = errors.New("kata shim's management socket")
	// ErrNotReady: the shim answers, but the guest's agent can't be reached yet.
	ErrNotReady = errors.New("kata agent is not ready")
	// ErrAddress: no address of a guest's agent.
	ErrAddress = errors.New("no address of a kata agent")
	// ErrHandshake: the hybrid vsock's end did not answer CONNECT as agreed.
	ErrHandshake = errors.New("hybrid vsock handshake failed")
	// ErrNoVMM: the VM's processes can't be told, so its end could not be shown.
	ErrNoVMM = errors.New("the VM's processes can't be told")
	// ErrNoEvidence: the VM could not be seen to be gone.
	ErrNoEvidence = errors.New("no evidence that the VM is gone")
	// ErrMount: a mount would not arrive in the guest as it is on the host.
	ErrMount = errors.New("mount would not arrive in the guest")
	// ErrAnnotation: an annotation would reach the shim.
	ErrAnnotation = errors.New("annotations are never passed to kata")
)
