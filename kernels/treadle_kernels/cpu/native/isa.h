// The choice of an instruction set.
#ifndef TREADLE_ISA_H
#define TREADLE_ISA_H

namespace treadle {

const char* isa_names();
int select_isa(const char* name);

}  // namespace treadle

#endif
