// Package grants fills the file system of a session's grants, on the node or inside a guest.
//
// It keeps promise P15: grants are held in memory, belong to the command, and are read by it alone. The runtimes and receiptd
// import it.
package grants
